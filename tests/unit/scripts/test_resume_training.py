"""resume_training: what it goes on from, whether the settings fit, the exact command; asks, and the run takes over."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base.own_python import python
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.restore_request import read_request
from launcher.config.compose import compose
from launcher.config.fingerprint import CONTENT, config_fingerprint
from launcher.run_files.run_paths import RunLock
from scripts import resume_training, setup_recovery
from tests.support.checkpoint_makers import (
    EXPERIMENT,
    TRIAL,
    USER,
    flip,
    make_areal,
    reseal,
    snapshot,
    write_areal_log,
    write_rewards,
)
from tests.support.trial_names import NAMES, trial_paths
from tests.support.worlds.checkpoints import HEALTHY, began

REPOSITORY = Path(__file__).parents[3]
SETTINGS = ["conf=arithmetic_cpu", f"experiment_name={EXPERIMENT}", f"trial_name={TRIAL}", "cluster.fileroot=root"]


class Replaced(Exception):
    """The process would be another program now."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run whose journal tells its command, as typed in this folder above its fileroot."""
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.fixture
def paths(made_trial, folder):
    shutil.copytree(made_trial, folder / "root")
    paths = trial_paths(folder / "root")
    fingerprint = config_fingerprint(compose(SETTINGS))
    for checkpoint in CheckpointStore(paths.default_checkpoints).list():
        reseal(checkpoint.path, config_fingerprint=fingerprint)
    tell(paths)
    return paths


def tell(paths, *events, rewards=HEALTHY, settings=SETTINGS):
    started = {"event": "run.started", "time": 999.0, "command": f"python -m launcher {' '.join(settings)}"}
    write_rewards(paths, rewards, events=[started | {"folder": str(paths.fileroot.parent)}, *events])


@pytest.fixture
def tool(folder, capsys, monkeypatch):
    """Returns (exit code or the command that took over, what was said). `answer`: what is typed."""

    def run(*flags, answer=""):
        became = []

        def replaced(program, words):
            became.extend([str(Path.cwd()), *words])
            raise Replaced

        monkeypatch.setattr(os, "execvp", replaced)
        monkeypatch.setattr("builtins.input", lambda _: answer)
        try:
            code = resume_training.main(["--fileroot", str(folder / "root"), *NAMES, *flags])
        except Replaced:
            code = became
        finally:
            os.chdir(folder.parent)
        out, err = capsys.readouterr()
        return code, out + err

    return run


def launched(folder, *settings):
    return [str(folder), sys.executable, "-m", "launcher", *(settings or SETTINGS)]


@pytest.mark.slow
def test_a_sound_run_goes_on_from_the_newest_and_is_told_the_last_good(tool, folder, paths):
    paths.metrics.write_text(paths.metrics.read_text() + "{\n")
    became, said = tool("--yes")
    assert became == launched(folder)
    assert said.splitlines()[0] == "exp/t1: resumes from step 38, the newest; no damage is known"
    assert "last good   step 25: " in said
    assert "settings    fit the checkpoint" in said
    assert "\nnot read: 1 line of metrics.jsonl is no record of a run (line 41: " in said
    assert f"command     cd {folder} && {python()} -m launcher {' '.join(SETTINGS)}" in said
    assert not paths.restore.exists()


@pytest.mark.slow
def test_where_damage_is_known_the_last_good_one_is_set_up(tool, folder, paths):
    tell(paths, began(1, 27))
    became, said = tool("--yes")
    assert became == launched(folder)
    assert said.splitlines()[0] == "exp/t1: resumes from step 15, the last good one"
    assert "damage      damage from about step 27 on" in said
    assert read_request(paths).step == 15


@pytest.mark.slow
def test_the_shown_command_sets_up_what_it_says_that_it_resumes_from(tool, folder, paths):
    """Pasted after a no, it resumed from the newest checkpoint, which holds the damage."""
    tell(paths, began(1, 27))
    command = shown(tool)
    assert command.startswith(f"{python()} -m scripts.setup_recovery ")
    assert " --good && cd " in command
    setup, _, launch = command.partition(" && ")
    assert launch == f"cd {folder} && {python()} -m launcher {' '.join(SETTINGS)}"
    assert setup_recovery.main(shlex.split(setup)[3:]) == 0
    assert read_request(paths).step == 15
    assert " --before-step 20 && cd " in shown(tool, "--before-step", "20")


def shown(tool, *flags):
    _, said = tool(*flags, answer="n")
    (line,) = (line for line in said.splitlines() if line.startswith("command "))
    return line.removeprefix("command").strip()


def test_damage_before_anything_is_certified(tool, folder, paths):
    tell(paths, began(1, 9))
    became, said = tool("--yes")
    assert became == launched(folder)
    assert said.splitlines()[0] == "exp/t1: resumes from step 5, a candidate"


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "step"), [(["--good"], 25), (["--before-step", "20"], 15)])
def test_another_choice(tool, folder, paths, flags, step):
    became, _ = tool(*flags, "--yes")
    assert became == launched(folder)
    assert read_request(paths).step == step


@pytest.mark.slow
def test_what_is_set_up_already_is_gone_on_from(tool, folder, paths):
    tool("--before-step", "20", "--yes")
    became, said = tool("--yes")
    assert became == launched(folder)
    assert said.splitlines()[0] == "exp/t1: resumes from step 15, as it was set up"


@pytest.mark.slow
def test_it_asks_and_a_no_changes_nothing(tool, folder, paths):
    tell(paths, began(1, 27))
    before = snapshot(paths.checkpoints)
    code, said = tool(answer="n")
    assert code == 1
    assert "nothing was changed, nothing was started" in said
    assert snapshot(paths.checkpoints) == before
    assert tool(answer="y")[0] == launched(folder)


@pytest.mark.slow
def test_settings_can_be_changed_on_the_way(tool, folder, paths):
    became, said = tool("sglang.mem_fraction_static=0.5", "--yes", "cluster.fileroot=root")
    kept = [setting for setting in SETTINGS if not setting.startswith("cluster")]
    assert became == launched(folder, *kept, "sglang.mem_fraction_static=0.5", "cluster.fileroot=root")
    assert "sglang.mem_fraction_static=0.5" in said


@pytest.mark.slow
def test_each_difference_is_told_with_both_values_and_what_it_means(tool, folder, paths):
    changed = ["train_dataset.batch_size=7", "gconfig.n_samples=3", "cluster.n_nodes=2"]
    code, said = tool("--yes", *changed)
    assert code == 2
    batch = compose(SETTINGS).train_dataset.batch_size
    assert f"train_dataset.batch_size was {batch}, is 7: the data position counts batches of another size" in said
    assert "gconfig.n_samples was" in said
    assert "is 3: advantages are normalised within groups of another size" in said
    assert "cluster.n_nodes was 1, is 2: the saved state was split over another number of nodes" in said
    assert "nothing was started" in said


@pytest.mark.slow
def test_torn_ones_are_passed_over_and_nothing_left_says_why(tool, folder, paths):
    store = CheckpointStore(paths.default_checkpoints)
    flip(store.find(38).path / "position.json")
    became, said = tool("--yes")
    assert became == launched(folder)
    assert "resumes from step 30, the newest" in said
    assert "passed over" in said
    assert "position.json was changed" in said
    for checkpoint in store.list():
        flip(checkpoint.path / "model.safetensors")
    code, said = tool("--yes")
    assert code == 1
    assert "has no complete checkpoint to resume from" in said
    assert "model.safetensors was changed" in said


@pytest.mark.slow
def test_nothing_good_says_why(tool, folder, paths):
    tell(paths, rewards=HEALTHY[:3])
    code, said = tool("--good", "--yes")
    assert code == 1
    assert "step 38 is candidate (0 healthy steps after it" in said


@pytest.mark.slow
def test_a_run_that_is_over_or_running_is_left_alone(tool, folder, paths):
    with RunLock(paths):
        code, said = tool("--yes")
    assert code == 2
    assert "is already running" in said
    config = compose(SETTINGS)
    lengths = {"total_train_steps": config.total_train_steps, "total_train_epochs": config.total_train_epochs}
    tell(paths, {"event": "run.finished", "time": 2000.0, "reason": "all steps"} | lengths)
    code, said = tool("--yes")
    assert code == 0
    assert "is FINISHED (all steps); nothing to do" in said


@pytest.mark.slow
def test_a_command_with_an_open_quote_is_named(tool, folder, paths):
    code, said = tool("--command", "python -m launcher 'conf=x")
    assert code == 2
    assert "--command" in said
    assert "no closing quotation" in said


@pytest.mark.slow
def test_a_command_that_nobody_wrote_down_is_asked_for(tool, folder, paths):
    write_rewards(paths, HEALTHY)
    code, said = tool("--yes")
    assert code == 2
    assert "--command 'python -m launcher" in said
    assert "events.jsonl does not say it" in said
    became, _ = tool("--yes", "--command", f"python -m launcher {' '.join(SETTINGS[:-1])} cluster.fileroot=run/root")
    assert became[0] == str(folder.parent)
    assert became[-1] == "cluster.fileroot=run/root"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["trial_name=t2"], "the command would resume"),
        (["no_such_key=1"], "no_such_key"),
        (["nonsense"], "'nonsense' is no setting"),
        (["/"], "the run goes by its names: --experiment-name, --trial-name"),
        (["--trial-name", "t2"], "holds t1"),
    ],
)
def test_wrong_input_is_one_message(tool, paths, flags, told):
    code, said = tool("--yes", *flags)
    assert code == 2
    assert told in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_the_run_really_takes_over(folder, paths):
    """The true command, whose plan says that it was composed: dry_run starts nothing, and refuses what a run would: the
    checkpoint was made with a queue of three prompts."""
    command = [sys.executable, "-m", "scripts.resume_training", "--fileroot", str(folder / "root"), *NAMES]
    command += ["dry_run=true", "--yes"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "prompts was 3, is 3664" in done.stderr) == (2, True), done.stderr
    assert "resumes from step 38" in done.stdout
    assert "arithmetic" in done.stdout.partition("dry_run=true")[2]


# ── AReaL's ──


@pytest.fixture
def areal(folder):
    top, info = make_areal(
        folder / "root", [20, 40, 60, 99], recover_step=99, rewards=[*HEALTHY, *HEALTHY[:30], *[0.0] * 30]
    )
    config = {"experiment_name": EXPERIMENT, "trial_name": TRIAL, "gconfig": {"n_samples": 4}, "seed": 1}
    (folder / "root" / "logs" / USER / EXPERIMENT / TRIAL / "config.yaml").write_text(json.dumps(config))
    return top, info


AREAL = "python3 examples/gsm8k.py --config gsm8k.yaml gconfig.n_samples=4"


def test_areal_goes_on_with_its_own_command(tool, folder, areal):
    became, said = tool("--yes", "--command", AREAL)
    assert became[1:3] == [sys.executable, "examples/gsm8k.py"]
    assert "settings    fit the checkpoint as far as the words of the command say" in said
    assert became[-2:] == ["recover.mode=auto", "recover.no_load_optim=true"]
    assert "an export: its weights with a fresh optimizer" in said.splitlines()[0]
    assert json.loads((areal[1] / "step_info.json").read_text())["global_step"] == 60


def test_areal_s_own_folder_needs_no_setup(tool, folder, areal):
    before = snapshot(areal[0])
    write_areal_log(folder / "root" / "logs" / USER / EXPERIMENT / TRIAL / "trainer.log", HEALTHY * 3)
    became, said = tool("--yes", "--command", AREAL)
    assert became[-1] == "recover.mode=auto"
    assert "resumes from step 99, AReaL's own recover folder, with its optimizer" in said
    assert snapshot(areal[0]) == before


def packed_badly(log):
    log.write_bytes(b"\x1f\x8b, no gzip")
    os.utime(log, (1.79e9, 1.79e9))  # a young one may be another machine's


@pytest.mark.parametrize("hide", [Path.unlink, packed_badly])
def test_without_its_logs_the_newest_is_taken_only_if_it_is_named(tool, folder, areal, hide):
    log = folder / "root" / "logs" / USER / EXPERIMENT / TRIAL / "trainer.log"
    hide(log)
    before = snapshot(folder / "root")
    code, said = tool("--yes", "--command", AREAL)
    assert code == 1
    assert "which checkpoint of exp/t1 is healthy can't be seen" in said
    assert "--before-step N" in said
    assert snapshot(folder / "root") == before
    became, said = tool("--yes", "--before-step", "100", "--command", AREAL)
    assert became[-1] == "recover.mode=auto"
    assert "health      not seen: " in said


def test_areal_s_differences_and_a_command_that_is_not_known(tool, folder, areal):
    code, said = tool("--yes", "--command", AREAL.replace("=4", "=8"))
    assert code == 2
    assert "gconfig.n_samples was '4', is '8'" in said
    code, said = tool("--yes")
    assert code == 2
    assert "--command" in said


def test_the_command_is_taken_from_areals_own_log(tool, folder, areal):
    log = folder / "root" / "logs" / USER / EXPERIMENT / TRIAL / "launcher.log"
    server = "python3 -m areal.infra.launcher.sglang_server a/gsm8k.py --config gsm8k.yaml sglang.random_seed=1 2>&1"
    log.write_text(f"20261120-18:14:23.037 LocalLauncher INFO: Starting local process with command: A=1 {server}\n")
    os.utime(log, (1.79e9, 1.79e9))
    said = tool("--yes")[1]
    assert "--command 'python3 -m areal.infra.launcher.local a/gsm8k.py --config gsm8k.yaml'" in said


@pytest.mark.parametrize("last", ["python3 train.py", 'python3 train.py "$@"', "exec python3 train.py ${@}"])
def test_a_script_that_hands_no_arguments_on(tool, folder, areal, last):
    (folder.parent / "run.sh").write_text(f"#!/bin/bash\n{last}\n")
    before = snapshot(folder / "root")
    found, said = tool("--yes", "--command", "bash run.sh")
    if "@" in last:
        assert found[-1] == "recover.no_load_optim=true"
        return
    assert found == 2
    assert "run.sh hands no arguments on, so recover.mode=auto" in said
    assert 'write "$@"' in said
    assert snapshot(folder / "root") == before
    assert "warning     " in tool("--command", "bash run.sh")[1]


def test_what_nobody_wrote_down_is_not_said_to_fit(tool, folder, areal):
    (folder / "root" / "logs" / USER / EXPERIMENT / TRIAL / "config.yaml").unlink()
    _, said = tool("--yes", "--command", AREAL)
    assert "settings    NOT compared" in said
    assert "fit the checkpoint" not in said


def test_a_fingerprint_has_all_that_the_tool_promises():
    assert set(config_fingerprint(compose(SETTINGS))) == {
        "experiment_name",
        "trial_name",
        "train_dataset.batch_size",
        "gconfig.n_samples",
        "cluster.n_nodes",
        "actor.path",
        CONTENT,
    }
