"""The report follows its run and ends with its word; a full disk or a defect of its own costs the run nothing."""

import dataclasses
import json
import time

import pytest

from launcher.base.messages import EvalReport, RunOutcome, TerminalStatus
from launcher.cli.run_screen import Screen
from launcher.config.schema import RunConfig
from launcher.html_report import report_writer
from launcher.html_report.report_writer import PAUSE_FACTOR, ReportWriter
from launcher.reporting.run_reader import RunReader
from launcher.run_files.journal import Journal, append_line
from launcher.run_files.run_paths import RunPaths
from tests.support.machine import wait_until
from tests.support.report_parts import facts_of_page
from tests.support.worlds.reporting import NOW


@pytest.mark.slow
def test_the_report_follows_the_run_and_ends_with_its_word(paths):
    journal = Journal(paths.events, 1)
    journal.record("run.started", reason="fresh")
    following = ReportWriter(paths, period_s=0.02)
    journal.record("run.running", state="RUNNING", reason="first of all")
    wait_until(lambda: paths.report.exists() and "first of all" in paths.report.read_text(), "the state")
    append_line(paths.metrics, {"global_step": 0, "attempt": 1, "time": time.time(), "rollout/reward": 0.25})
    wait_until(lambda: facts_of_page(paths)["learning"]["last"] == 0.25, "the step in the report")
    assert facts_of_page(paths)["life"]["live"] is True
    journal.record("run.finished", reason="all is done")
    following.close()
    said = facts_of_page(paths)
    assert said["status"] == ["FINISHED", "good", "all is done"]
    assert said["life"]["live"] is False
    assert not [path for path in paths.logs.iterdir() if path.name.startswith(".report")]
    following.close()  # once is enough, twice does no harm


def test_a_report_that_can_not_be_written_costs_the_run_nothing(paths, caplog):
    Journal(paths.events, 1).record("run.started", reason="fresh")
    paths.report.mkdir()  # a folder in its place refuses every rename
    following = ReportWriter(paths, period_s=0.01)
    wait_until(lambda: "was not written" in caplog.text, "the warning")
    following.close()
    assert not following._thread.is_alive()


def test_a_defect_of_the_report_costs_the_run_nothing(paths, monkeypatch, caplog):
    monkeypatch.setattr(report_writer, "render_page", lambda *_, **__: 1 / 0)
    Journal(paths.events, 1).record("run.started", reason="fresh")
    following = ReportWriter(paths, period_s=0.01)
    wait_until(lambda: "could not be made" in caplog.text, "the log line")
    following.close()


def test_a_page_that_takes_long_is_made_seldom(paths, monkeypatch):
    """Its share of the time is 1 / PAUSE_FACTOR at most, whatever it costs."""
    clock, pauses = [0.0], []

    class Ended:
        def wait(self, pause_s):
            pauses.append(pause_s)
            return len(pauses) > 3

        def is_set(self):
            return True

        def set(self):
            pass

    following = object.__new__(ReportWriter)
    following._period_s = 10.0
    following._ended = Ended()
    monkeypatch.setattr(report_writer.time, "monotonic", lambda: clock[0])
    costs = iter([0.01, 0.5, 2.0])
    following._turn = lambda *, is_live: clock.__setitem__(0, clock[0] + next(costs))
    following._follow()
    assert pauses == pytest.approx([10.0, 10.0, 50.0, 200.0])


def test_a_page_is_patient_for_as_long_as_the_next_one_is_waited_for(paths, monkeypatch):
    """Where a page took 2 s the next one came after 200 s, and it said after 60 that the driver may be gone."""
    clock, facts_of = [0.0], report_writer.facts_of_run
    Journal(paths.events, 1).record("run.started", reason="fresh")

    def slow(*given, **named):
        clock[0] += 2.0
        return facts_of(*given, **named)

    monkeypatch.setattr(report_writer, "facts_of_run", slow)
    monkeypatch.setattr(report_writer.time, "monotonic", lambda: clock[0])
    report_writer.write_report(paths, is_live=True)
    assert facts_of_page(paths)["patience_s"] > PAUSE_FACTOR * clock[0]


@pytest.mark.slow
def test_a_run_in_which_nothing_happens_has_a_young_page_all_the_same(paths):
    """As in a step of ten minutes: the page grew old, and said that the driver may be gone."""
    Journal(paths.events, 1).record("run.started", reason="fresh")
    following = ReportWriter(paths, period_s=0.02)
    wait_until(paths.report.exists, "the first page")
    written_at = facts_of_page(paths)["written_at"]
    wait_until(lambda: facts_of_page(paths)["written_at"] > written_at, "another page")
    following.close()


def small_run(tmp_path):
    config = RunConfig(experiment_name="exp")
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    return config, paths


@pytest.mark.slow
@pytest.mark.parametrize("word", list(TerminalStatus))
def test_whatever_a_runs_word_is_its_last_report_has_it_and_the_console_says_where(tmp_path, capsys, word):
    config, paths = small_run(tmp_path)
    with Screen(config, paths) as screen:
        screen.begin(1)
        journal = Journal(paths.events, 1)
        journal.record("run.started", reason="fresh")
        journal.record(f"run.{word.lower()}", reason="so it is")
        screen.close(RunOutcome(status=word, reason="so it is"))
    look = "good" if word is TerminalStatus.FINISHED else "bad"
    assert facts_of_page(paths)["status"] == [word, look, "so it is"]
    assert f"report      {paths.report}" in capsys.readouterr().out


def test_a_driver_that_breaks_leaves_a_report_too(tmp_path):
    config, paths = small_run(tmp_path)
    with pytest.raises(ZeroDivisionError), Screen(config, paths) as screen:
        screen.begin(1)
        Journal(paths.events, 1).record("run.started", reason="fresh")
        1 / 0  # noqa: B018
    assert facts_of_page(paths)["status"][0] == "ENDED WITHOUT A STATUS"


def test_new_lines_alone_are_read_again(paths):
    reader = RunReader(paths)
    assert reader.refresh() == 0
    append_line(paths.metrics, {"global_step": 0})
    assert (reader.refresh(), reader.refresh()) == (1, 0)
    with paths.metrics.open("a") as file:
        file.write(json.dumps({"global_step": 1}))
    assert reader.refresh() == 0  # it is still being written
    assert reader.refresh(has_ended=True) == 1


def test_each_evaluation_is_told_once_also_when_old_ones_are_left_out(tmp_path, capsys):
    evals = [EvalReport(policy_version=version, prompts=1, sampled=0.5, greedy=0.5) for version in range(5)]
    config, paths = small_run(tmp_path)
    with Screen(config, paths) as screen:
        screen.begin(1)
        for shown in (evals[:2], evals[:3], [evals[0], *evals[2:4]], [evals[0], *evals[3:5]], evals[:1]):
            screen.show(dataclasses.replace(NOW, evals=tuple(shown)), [])
    said = capsys.readouterr().out
    assert [said.count(f"held-out accuracy at policy_version {version}:") for version in range(5)] == [1] * 5
