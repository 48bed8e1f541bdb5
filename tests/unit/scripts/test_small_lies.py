"""Small lies of the tools: faults that are none, health that was not seen, commands and links that lead astray."""

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest

from launcher.base.own_python import python
from launcher.checkpoints.trial_folders import find_trial
from launcher.config.compose import compose
from launcher.config.fingerprint import config_fingerprint, fingerprint_differences
from launcher.diagnosis.judging.verdict import RunCondition
from launcher.html_report.report_writer import write_report
from launcher.run_files.journal import append_line
from launcher.run_files.run_paths import RunPaths
from scripts import check_health
from scripts.checkpoints.command import recorded_command
from scripts.ending import WRONG, ended
from tests.support.long_run import LongRun
from tests.support.report_parts import facts_of_page
from tests.support.worlds.diagnosis import diagnosis_of

BEGIN = 1.8e9


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(fileroot=tmp_path / "root", user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    return paths


def write_run(paths, *, hours_after=None, events=()):
    """60 steps of a minute each; `hours_after` step 29 none came for two hours."""
    for step in range(60):
        late = 7200 if hours_after is not None and step > 29 else 0
        line = {"global_step": step, "time": BEGIN + 60 * step + late, "attempt": 1, "grpo_actor/task_reward/avg": 0.5}
        append_line(paths.metrics, line)
    for seconds, event, more in events:
        append_line(paths.events, {"time": BEGIN + seconds, "event": event, "attempt": 1, "subject": "run", **more})


# ── a pause that was asked for ──


def test_a_pause_that_was_asked_for_is_no_stall(paths):
    asked = {"reason": "a pause asked by ann@host: the disk is moved"}
    events = [(60 * 29 + 5, "run.hold_asked", asked), (60 * 29 + 7195, "run.hold_released", {})]
    write_run(paths, hours_after=29, events=[(0, "run.started", {}), *events, (1e4, "run.finished", {})])
    found = diagnosis_of(paths.logs)
    assert found.condition is RunCondition.FINE
    assert found.losses == ()


def test_what_was_asked_for_after_hours_without_a_step_explains_none_of_them(paths):
    events = [(60 * 29 + 7000, "run.hold_asked", {"reason": "a pause"}), (60 * 29 + 7195, "run.hold_released", {})]
    write_run(paths, hours_after=29, events=[(0, "run.started", {}), *events, (1e4, "run.finished", {})])
    assert diagnosis_of(paths.logs).condition is RunCondition.STALLED


# ── a run that was copied or moved ──


def write_command(paths, *settings, folder):
    words = " ".join(["python", "-m", "launcher", "conf=arithmetic_cpu", *settings])
    append_line(paths.events, {"time": BEGIN, "event": "run.started", "command": words, "folder": str(folder)})
    paths.config.write_text(
        f"experiment_name: exp\ntrial_name: t0\ncluster:\n  fileroot: {paths.fileroot}\n", encoding="utf-8"
    )


def trial_at(paths):
    return find_trial(paths.fileroot, paths.user, paths.experiment_name, paths.trial_name)


def test_a_copied_run_is_continued_where_it_lies_and_the_original_is_not(paths, tmp_path):
    write_command(paths, "cluster.fileroot=root", "seed=3", folder=tmp_path)
    original = trial_at(paths)
    assert recorded_command(original).settings == ("conf=arithmetic_cpu", "cluster.fileroot=root", "seed=3")
    copy = RunPaths(fileroot=tmp_path / "copy", user="ann", experiment_name="exp", trial_name="second")
    copy.prepare()
    shutil.copytree(paths.logs, copy.logs, dirs_exist_ok=True)
    assert recorded_command(trial_at(copy)).settings == (
        "conf=arithmetic_cpu",
        "seed=3",
        "trial_name=second",
        f"cluster.fileroot={tmp_path / 'copy'}",
    )


def test_a_command_that_no_shell_takes_is_none(paths, tmp_path):
    """A damaged line of the journal ended the tool: "No closing quotation"."""
    write_command(paths, "seed=3", folder=tmp_path)
    for damaged in ("python -m launcher 'x", 7, ["python"], "another program"):
        append_line(paths.events, {"time": BEGIN, "event": "run.started", "command": damaged, "folder": [10**400]})
    assert recorded_command(trial_at(paths)).settings == ("conf=arithmetic_cpu", "seed=3")


def test_a_moved_checkout_is_entered_where_it_is_now(paths, tmp_path, monkeypatch):
    write_command(paths, folder=tmp_path / "gone")
    monkeypatch.chdir(tmp_path)
    assert recorded_command(trial_at(paths)).folder == str(tmp_path)


def model_in(folder, *, weight=b"w"):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weight * 3_000_000)
    return folder


def fingerprint_with(model):
    return config_fingerprint(compose(["conf=arithmetic_cpu", f"actor.path={model}"]))


@pytest.mark.slow
def test_a_model_is_the_same_wherever_it_lies_and_another_under_the_same_path_is_not(tmp_path):
    before = fingerprint_with(model_in(tmp_path / "old"))
    (tmp_path / "old").rename(tmp_path / "new")
    after = fingerprint_with(tmp_path / "new")
    assert fingerprint_differences(before, after) == ()
    model_in(tmp_path / "old", weight=b"v")
    (difference,) = fingerprint_differences(before, fingerprint_with(tmp_path / "old"))
    assert "the weights belong to another model" in str(difference)


def test_a_checkpoint_without_its_model_s_content_is_compared_by_path(tmp_path):
    now = fingerprint_with(model_in(tmp_path / "a"))
    before = {key: value for key, value in now.items() if "content" not in key}
    assert fingerprint_differences(before, now) == ()
    assert fingerprint_differences({**before, "actor.path": "/b"}, now)


# ── the report ──


def test_the_report_links_to_files_that_are_there(paths):
    LongRun(paths, steps=60, incidents=3).write()
    write_report(paths, is_live=False)
    links = facts_of_page(paths)["files"]
    assert "metrics.jsonl" in links
    assert [link for link in links if not (paths.logs / link).exists()] == []


def test_a_run_that_was_never_resumed_is_resumed_nowhere(paths):
    """Its trainer looks for something to restore before its first step too."""
    first = {"global_step": -1, "subject": "trainer", "reason": "the weights that it began with"}
    write_run(paths, events=[(-60, "run.started", {"reason": "fresh"}), (-30, "trainer.restored", first)])
    assert write_report(paths, is_live=False).restores == ()
    assert facts_of_page(paths)["restores"] == []


# ── no traceback ──


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EACCES, "this user may read and write it"), (errno.ENOSPC, "make room on its disk")]
)
def test_a_folder_that_can_t_be_read_and_a_full_disk_are_one_message(capsys, number, remedy):
    def fails():
        raise OSError(number, os.strerror(number), "/data/logs")

    assert ended(fails) == WRONG
    said = capsys.readouterr().err
    assert said.startswith(f"error: /data/logs: {os.strerror(number)}\n")
    assert remedy in said


def test_settings_that_are_a_link_to_nothing_are_named(paths, capsys):
    append_line(paths.events, {"time": BEGIN, "event": "run.started", "attempt": 1})
    (paths.logs / "config.attempt2.yaml").symlink_to(paths.logs / "gone.yaml")
    assert check_health.main([str(paths.logs)]) == WRONG
    said = capsys.readouterr().err
    assert said.startswith(f"error: {paths.logs / 'config.attempt2.yaml'} is a link to a file that is not there")


# ── the interpreter ──


def test_a_command_to_be_typed_names_the_interpreter_that_runs(monkeypatch, tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert python() == sys.executable  # another environment's, though it links to the same file
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert python() == "python"
