"""No tool skips anything in silence: its last line, or a finding, counts what was not read and says why."""

import json
import shutil

import pytest

from launcher.reporting.figures import Window
from launcher.run_files.run_paths import RunPaths
from scripts import check_health, diagnose, list_checkpoints, report, setup_recovery
from scripts.watch_page.watched_run import SeenOnPage, WatchedRun
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL, USER, write_areal_log, write_rewards
from tests.support.report_parts import facts_of_page
from tests.support.trial_names import NAMES, trial_paths
from tests.support.worlds.checkpoints import HEALTHY

TORN = "2 lines of metrics.jsonl are no record of a run"
FOREIGN = "1 line of events.jsonl is no record of a run"


@pytest.fixture(scope="module")
def root(made_trial, tmp_path_factory):
    """A run of ours with two torn lines among its steps and one among its events."""
    root = tmp_path_factory.mktemp("ours") / "root"
    shutil.copytree(made_trial, root)
    paths = trial_paths(root)
    write_rewards(paths, HEALTHY, events=({"event": "run.started", "time": 999.0},))
    lines = paths.metrics.read_text().splitlines()
    paths.metrics.write_text("\n".join([*lines[:7], lines[7][:40], "", "[1, 2]", *lines[8:]]) + "\n")
    with paths.events.open("a") as file:
        file.write("\x00\x00\x00\n")
    return root


@pytest.fixture
def last_line(root, capsys):
    def run(tool, *flags):
        tool.main(["--fileroot", str(root), *NAMES, *flags])
        said = capsys.readouterr()
        return " ".join(said.out.partition("not read")[2].split())

    return run


@pytest.mark.parametrize(
    ("tool", "flags"),
    [
        (list_checkpoints, ()),
        (list_checkpoints, ("--before-step", "1")),
        (setup_recovery, ("--before-step", "16")),
        (diagnose, ("--no-progress",)),
        (report, ()),
        (check_health, ()),
    ],
)
def test_torn_lines_are_counted_at_the_end(last_line, tool, flags):
    said = last_line(tool, *flags)
    assert TORN in said
    assert FOREIGN in said


def test_programs_get_it_too(root, capsys):
    for tool in (list_checkpoints, report):
        tool.main(["--fileroot", str(root), *NAMES, "--json"])
        assert any(TORN in text for text in json.loads(capsys.readouterr().out)["not_read"])


def test_the_report_and_the_watch_page_say_it(root):
    paths = RunPaths(fileroot=root, user=USER, experiment_name=EXPERIMENT, trial_name=TRIAL)
    report.main(["--fileroot", str(root), *NAMES])
    assert facts_of_page(paths)["not_read"] == [FOREIGN, TORN]
    assert WatchedRun(paths).answer(SeenOnPage(window=Window()))["not_read"] == [FOREIGN, TORN]


def test_of_areal_s_logs_the_files_that_tell_of_no_step_are_named(tmp_path, capsys):
    logs = tmp_path / "logs" / USER / EXPERIMENT / TRIAL
    write_areal_log(logs / "trainer.log", [0.5] * 60)
    (logs / "llm_server.log").write_text("The server is fired up and ready to roll!\n")
    (logs / "notes.txt").write_text("mine\n")
    (tmp_path / "checkpoints" / USER / EXPERIMENT / TRIAL / "default").mkdir(parents=True)
    list_checkpoints.main(["--fileroot", str(tmp_path), *NAMES])
    last = " ".join(capsys.readouterr().out.partition("not read")[2].split())
    assert last == ": 2 files; llm_server.log (a server's, which tells of no step); notes.txt: not named as a log"
