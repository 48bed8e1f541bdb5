"""What a fault on another project's trainer cost, by the lines of metrics.jsonl and its log; and what is refused."""

import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from actors.foreign.foreign_process import start
from actors.processes.process_tree import identify
from launcher.adapters.trainer_adapter import TrainerCommand
from launcher.run_files.journal import append_line
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.step_line import StepLine
from scripts.lab.adapter_storm import (
    _has_stepped,
    _is_known,
    _learned,
    _starve,
    _target,
    main,
)
from scripts.lab.foreign_cost import FaultCost, cost_of, fault_cost

TOOK = [(1.0, 0), (2.0, 1), (3.0, 2), (13.0, 1), (14.0, 2), (15.0, 3), (16.0, 4)]
LINES = [{"time": moment, "global_step": step, "timeperf/step_s": 1.0} for moment, step in TOOK]


@pytest.mark.parametrize(
    ("at", "cost"),
    [
        (3.5, FaultCost(after_step=2, seconds=11.5, late_s=11.0, steps_again=2)),
        (15.5, FaultCost(after_step=3, seconds=0.5, late_s=0.0, steps_again=0)),
        (16.5, FaultCost(after_step=4, seconds=None, steps_again=0)),
        (0.5, FaultCost(after_step=-1, seconds=0.5, steps_again=0)),
    ],
)
def test_a_fault_costs_the_time_to_a_new_step_and_the_steps_taken_again(at, cost):
    assert cost_of([StepLine.of(line, number) for number, line in enumerate(LINES)], at) == cost


def test_a_step_that_a_killed_trainer_had_taken_is_not_the_first_of_the_next_one(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    paths.trainer_log.touch()
    late = [*LINES[:3], {"time": 3.6, "global_step": 3}, *LINES[3:]]
    for line in late[:4]:
        append_line(paths.metrics, line)
    append_line(paths.events, {"time": 0.5, "event": "trainer.starting", "subject": "trainer"})
    assert not _has_stepped(paths, 3.5, "kill")
    assert _has_stepped(paths, 3.5, "server")
    append_line(paths.events, {"time": 5.0, "event": "trainer.starting", "subject": "trainer"})
    for line in late[4:]:
        append_line(paths.metrics, line)
    assert fault_cost(paths, paths.trainer_log, 0, 3.5, "kill") == FaultCost(
        after_step=3, seconds=12.5, late_s=11.4, steps_again=3
    )


def test_lines_of_another_program_cost_nothing_and_end_no_storm(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    paths.trainer_log.touch()
    foreign = ({"of": "another program"}, {"event": ["server.died"], "time": 3.6}, {"global_step": "9", "time": 3.6})
    for line in (*LINES, *foreign, {"global_step": 9}):
        append_line(paths.metrics, line)
    for line in (*foreign, {"event": "server.died", "time": "soon"}, {"event": "trainer.starting", "time": 4.0}):
        append_line(paths.events, line)
    cost = fault_cost(paths, paths.trainer_log, 0, 3.5, "kill")
    assert (cost.after_step, cost.seconds, cost.steps_again, cost.noticed_s) == (2, 11.5, 2, None)


def test_errors_that_its_client_logged_after_the_fault_are_counted_and_its_first_event_dates_it(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    failed = "HTTP request to 127.0.0.1:1/generate failed with ServerDisconnectedError: x (attempt 1/3)\n"
    paths.trainer_log.write_text(failed)
    begin = paths.trainer_log.stat().st_size
    with paths.trainer_log.open("a") as log:
        log.write(failed * 2 + "Workflow execution failed: Failed after 3 retries each.\n")
    for line in LINES:
        append_line(paths.metrics, line)
    for at, name in ((2.0, "server.died"), (3.75, "weights.refused"), (4.0, "server.died"), (5.0, "incident.began")):
        append_line(paths.events, {"time": at, "event": name, "subject": "server-0"})
    cost = fault_cost(paths, paths.trainer_log, begin, 3.5, "server")
    assert (cost.seconds, cost.noticed_s, cost.http_errors, cost.groups_dropped) == (11.5, 0.5, 2, 1)


def test_rewards_are_broken_only_where_the_reward_function_is_this_tools(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("AREAL_RIG", raising=False)
    assert main(["areal", "--faults", "zero", "--", f"cluster.fileroot={tmp_path}/runs"]) == 2
    assert "AREAL_RIG" in capsys.readouterr().err
    monkeypatch.setenv("AREAL_RIG", str(tmp_path / "rig"))
    assert main(["areal", "--faults", "zero", "--output", str(tmp_path / "runs")]) == 2
    assert "AREAL_RIG" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_rewards_at_0_are_mended_once_the_run_knows_of_them():
    collapse = {"time": 2.0, "event": "incident.began", "cause": "reward_collapse"}
    assert [_is_known(collapse, since) for since in (1.0, 3.0)] == [True, False]
    assert not _is_known({**collapse, "cause": "trainer_crash"}, 1.0)


def test_more_faults_than_steps_are_refused_before_anything_is_started(capsys, tmp_path):
    settings = ("trainer.command='python t.py'", f"cluster.fileroot={tmp_path}/runs")
    assert main(["command", "--steps", "3", "5", "--", *settings]) == 2
    assert "--steps 3 5 has no room for 3 faults" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_run_of_trl_needs_an_interpreter_that_has_it_or_a_script(capsys, tmp_path, monkeypatch):
    for python in (sys.executable, str(tmp_path / "none")):
        monkeypatch.setenv("TRL_PYTHON", python)
        monkeypatch.setattr("scripts.lab.trl_rig.LOOKS_FOR", "raise SystemExit(1)")
        assert main(["trl", "--output", str(tmp_path / "runs")]) == 2
        assert f"TRL_PYTHON: {python} has no trl" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_may_write_to_nothing_more_ends_of_it():
    grows = "import time\nprint(flush=True)\nheld = [(time.sleep(0.01), bytearray(1 << 16)) for _ in range(1000)]"
    with subprocess.Popen([sys.executable, "-c", grows], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        with subprocess.Popen(["sleep", "60"]) as waits:
            ended = _starve(identify(process.pid), waits)
            waits.kill()
        process.kill()
        assert ended
        assert b"MemoryError" in process.stderr.read()


async def test_a_fault_hits_the_command_and_not_the_launchers_host_above_it(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    process = await start(TrainerCommand(words=("sleep", "3600"), cwd=tmp_path, variables={}), paths, {}, stop_s=0.1)
    adapter, run = SimpleNamespace(is_trainer=lambda _: False), SimpleNamespace(poll=lambda: None)
    try:
        hits = [
            _target(fault, paths, adapter, run, random.Random(seed)) for fault in ("kill", "any") for seed in (1, 2)
        ]
    finally:
        await process.end()
    assert {hit.pid for hit in hits} == {process.pid}


def test_what_was_learned_is_the_reward_of_the_last_steps_that_count(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    assert _learned(paths) == "no rewards"
    for step, reward in [(0, 0.0), (1, 0.0), (0, 0.25), (1, 0.75)]:
        append_line(paths.metrics, {"time": 1.0, "global_step": step, "rollout/reward": reward})
    assert _learned(paths) == "reward 0.500 in the last 10"
    append_line(paths.metrics, {"time": 3.0, "global_step": 2, "rollout/reward": 0.5, "timeperf/step_s": 2.0})
    assert _learned(paths) == "reward 0.500 in the last 10, 2.00 s a step (median)"
