"""Who a sweep's trials are, how many run at a time, and what counts as done."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config.compose import compose
from launcher.config.schema import RunConfig
from launcher.resources.gpus import Gpu
from launcher.resources.hardware import Hardware
from launcher.resources.missing_files import find_shape
from launcher.resources.run_plan import make_plan
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunLock, RunPaths
from launcher.sweep.sweep_command import candidates_of
from launcher.sweep.sweep_run import is_held, visible_gpus
from launcher.sweep.sweep_trials import SweepTrial, plan_sweep
from launcher.sweep.trial_capacity import find_capacity
from launcher.sweep.trial_results import TrialStatus, result_of, settled
from tests.support.composed import composed
from tests.support.preflight_parts import changed

GIB = 2**30
PRESET = "conf=arithmetic_cpu"
TOKENS, ROLLOUTS = "sglang.max_total_tokens", "rollout.max_concurrent_rollouts"
MACHINE = Hardware(gpus=(), cpus=16, memory=64 * GIB, memory_free=64 * GIB)
TRIAL = SweepTrial(name="t", settings={}, overrides=())


def names(*combinations):
    return [trial.name for trial in plan_sweep(combinations).trials]


def test_a_trial_is_named_by_what_it_is():
    first, second = names([PRESET, f"{TOKENS}=1", "seed=3"], [PRESET, f"{TOKENS}=2", "seed=3"])
    assert re.fullmatch(r"max_total_tokens-1-[0-9a-f]{8}", first)
    assert first.rpartition("-")[2] != second.rpartition("-")[2]


def test_a_sweep_started_again_or_with_more_values_finds_what_it_made():
    two = plan_sweep([[PRESET, f"{TOKENS}={n}"] for n in (1, 2)])
    three = plan_sweep([[PRESET, "dry_run=false", f"{TOKENS}={n}", "cluster.fileroot=/x"] for n in (3, 2, 1)])
    assert {trial.name for trial in two.trials} < {trial.name for trial in three.trials}
    assert two.name == three.name
    other = plan_sweep([[PRESET, f"{TOKENS}={n}", "seed=7"] for n in (1, 2)])
    assert {trial.name for trial in other.trials} & {trial.name for trial in two.trials} == set()
    assert other.name != two.name


def test_names_are_folders_whatever_is_swept():
    swept = [f"train_dataset.path=/a b/../{'x' * 200}{n}" for n in range(2)]
    found = names(*([PRESET, one] for one in swept))
    assert len(set(found)) == 2
    for name in found:
        RunPaths(fileroot=Path("/"), user="u", experiment_name="e", trial_name=name)
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name)


def test_a_name_of_the_users_comes_first_and_a_double_runs_once():
    (only,) = plan_sweep([[PRESET, "trial_name=mine", "seed=1"]] * 2).trials
    assert only.name.startswith("mine-")
    assert [one for one in only.overrides if one.startswith("trial_name=")] == [f"trial_name={only.name}"]


@pytest.mark.parametrize(
    ("swept", "more", "kept"),
    [
        (TOKENS, [], ["memory.give_way=false", "memory.remember=false"]),
        (ROLLOUTS, [], ["memory.give_way=false", "memory.remember=false"]),
        (TOKENS, ["memory.remember=true"], ["memory.remember=true", "memory.give_way=false"]),
        ("seed", [], []),
    ],
)
def test_what_is_swept_gives_no_way(swept, more, kept):
    sweep = plan_sweep([[PRESET, *more, f"{swept}={n}"] for n in (4, 8)])
    assert len(sweep.trials) == 2
    for trial in sweep.trials:
        assert [one for one in trial.overrides if one.startswith("memory.")] == kept


def room(hardware, *overrides, trials=6):
    (trial,) = plan_sweep([[PRESET, *overrides]]).trials
    configs = [compose(list(trial.overrides))] * trials
    return find_capacity(configs, [make_plan(config, hardware, find_shape(config)) for config in configs], hardware)


@pytest.mark.slow
def test_side_by_side_as_the_machine_allows():
    assert len(room(MACHINE).slots) == 6
    assert len(room(replace(MACHINE, cpus=9)).slots) == 4
    few = room(replace(MACHINE, memory_free=10 * GIB))
    assert (len(few.slots), few.reason) == (2, "4.5 of 10.0 GiB of free memory each")
    assert len(room(replace(MACHINE, cpus=1)).slots) == 1
    assert len(room(replace(MACHINE, cpus=1), "sweep.parallel=3").slots) == 3
    assert len(room(MACHINE, "sglang.port=4000").slots) == 1
    assert len(room(MACHINE, "cluster.address=10.0.0.1:6379").slots) == 1


@pytest.mark.slow
def test_each_trial_has_gpus_of_its_own(monkeypatch):
    gpu = Gpu(name="GPU", memory=80 * GIB, free=80 * GIB)
    machine = replace(MACHINE, gpus=(gpu,) * 4)
    on_gpu = ("sglang.device=cuda", "actor.device=cuda")  # a whole one for the server, another for the trainer
    assert room(machine, *on_gpu).slots == ((0, 1), (2, 3))
    assert room(machine, *on_gpu, "sweep.parallel=5").slots == ((0, 1), (2, 3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert visible_gpus((2, 3)) == ["6", "7"]


def run_paths(folder) -> tuple[RunConfig, RunPaths]:
    config = RunConfig(experiment_name="e", trial_name="t", total_train_steps=3)
    config.cluster.fileroot = str(folder)
    paths = RunPaths.of(config)
    paths.prepare()
    return config, paths


@pytest.mark.parametrize(
    ("events", "is_done", "is_done_with_retry"),
    [
        ([], False, False),
        ([("run.started", "")], False, False),
        ([("run.started", ""), ("run.finished", "")], True, True),
        ([("run.errored", "server_oom of server-0")], True, True),
        ([("run.errored", "server_crash of server-0")], True, False),
        ([("run.errored", "server_oom of server-0"), ("run.started", "")], False, False),
        ([("run.aborted", "ended by the user")], False, False),
    ],
)
def test_what_is_done(tmp_path, events, is_done, is_done_with_retry):
    config, paths = run_paths(tmp_path)
    for name, reason in events:
        Journal(paths.events, 1).record(name, reason=reason, total_train_steps=3, total_train_epochs=1)
    assert settled(config, paths, retry=False) is is_done
    assert settled(config, paths, retry=True) is is_done_with_retry


@pytest.mark.parametrize("event", ["", "run.started"])
def test_a_trial_that_ended_without_a_word_has_its_last_lines(tmp_path, event):
    _, paths = run_paths(tmp_path)
    if event:
        Journal(paths.events, 1).record(event, reason="fresh")
    result = result_of(TRIAL, paths, output="exit code 1: no module")
    assert (result.status, result.reason, result.step_s) == (TrialStatus.CUT_OFF, "exit code 1: no module", None)


def test_a_run_that_lives_is_seen_without_a_trace(tmp_path):
    _, paths = run_paths(tmp_path)
    assert not is_held(paths)
    assert not paths.lock.exists()
    with RunLock(paths):
        assert is_held(paths)
    assert not is_held(paths)


@pytest.mark.parametrize(
    ("swept", "more", "kept"),
    [
        (ROLLOUTS, {}, ["sglang.mem_fraction_static=0.6", "actor.gradient_checkpointing=true"]),
        ("seed", {}, []),
        (ROLLOUTS, {"hardware__auto": True}, []),
    ],
)
def test_in_a_sweep_over_memory_what_is_not_swept_has_the_presets_values_in_each_trial(swept, more, kept):
    """Fitted to each trial's own value it would differ too."""
    marked = ["sglang.mem_fraction_static", "actor.gradient_checkpointing"]
    config = changed(composed("conf=gsm8k_h200"), **more)
    combinations = [[PRESET, f"{swept}={n}"] for n in (8, 16)]
    sweep, candidates = candidates_of(combinations, lambda overrides: (config, marked))
    for planned, one in zip(sweep.trials, candidates, strict=True):
        assert one.trial.name == planned.name
        assert one.trial.overrides == (*planned.overrides, *kept)
        assert one.marked == (() if kept else tuple(marked))
