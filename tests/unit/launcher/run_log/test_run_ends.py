"""How attempts began and ended, from their events."""

import json

import pytest

from launcher.checkpoints.resume_decision import already_finished
from launcher.cli.run_end import close_as_recorded
from launcher.config.schema import RunConfig
from launcher.reporting.run_facts import read_facts
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_clock import AttemptSpan
from launcher.run_log.run_log import last_end, read_run_log
from scripts.health.recorded_run import read_view
from scripts.run_control import state_of

T0 = 1_790_000_000.0


@pytest.fixture
def ended(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="e", trial_name="t")
    paths.logs.mkdir(parents=True)

    def write(*events):
        lines = [event if isinstance(event, dict) else {"event": event} for event in events]
        paths.events.write_text(
            "".join(json.dumps({"at": at, "time": T0 + at} | line) + "\n" for at, line in enumerate(lines))
        )
        return paths

    return write


def test_the_last_attempts_end_counts(ended):
    assert last_end(ended("run.started", "run.errored", "run.started")) is None
    assert last_end(ended("run.started", "run.errored"))["at"] == 1
    assert last_end(ended("run.finished", "recovery.taken"))["at"] == 0
    assert last_end(ended("run.finished", "incident.began"))["at"] == 0


def test_a_foreign_line_is_passed_over(ended):
    paths = ended("run.started", "run.finished", {"event": ["run.started"]}, {"event": {"of": "another program"}})
    with paths.events.open("a") as file:
        file.write('null\n{"event": "run.star')
    assert last_end(paths)["at"] == 1


def said_of(paths):
    """By each tool that says whether a run has ended."""
    end, facts = last_end(paths), read_facts(paths)
    words = (facts.word, read_view(paths).status)
    return "" if end is None else end["event"], *words, state_of(paths)[0], facts.states[-1][1]


def test_a_line_that_an_attempt_writes_late_does_not_end_the_one_that_followed(ended):
    """A driver whose machine had lost the network wrote its end when another attempt was under way: run_control said
    that the run was over, and the report that it was not."""
    events = [{"event": "run.started", "attempt": one} for one in (1, 2)]
    running = {"event": "run.running", "attempt": 2, "state": "RUNNING"}
    serves = {"event": "server.ready", "subject": "server-0", "attempt": 2}
    died = {"event": "server.died", "subject": "server-0", "attempt": 1}
    paths = ended(*events, running, serves, died, {"event": "run.aborted", "attempt": 1})
    assert [state for _, state, _ in read_run_log(paths).server_changes["server-0"]] == ["READY"]
    assert said_of(paths) == ("", "", "", "RUNNING", "RUNNING")


def test_what_ends_before_it_has_an_attempt_of_its_own_ends_the_last_one(ended):
    """The driver of a detached run never got the run's lock: the report showed that the run still went on, in two
    attempts, of which the real one began when it was over."""
    paths = ended({"event": "run.started", "attempt": 3}, {"event": "run.errored", "attempt": 0, "reason": "no lock"})
    assert read_run_log(paths).attempts() == (AttemptSpan(number=3, start=T0, end=T0),)
    assert said_of(paths) == ("run.errored", "ERRORED", "ERRORED", "ERRORED", "ERRORED")
    assert read_run_log(paths).last_word()[1] == "no lock"


def test_a_driver_that_never_began_an_attempt_adds_no_time_to_the_last_one(ended):
    """A detached command was refused two days after the last attempt: these days were counted, and priced, as its."""
    refused = {"event": "run.errored", "attempt": 0, "time": T0 + 2 * 86_400, "reason": "refused"}
    paths = ended({"event": "run.started", "attempt": 3}, {"event": "run.aborted", "attempt": 3}, refused)
    assert read_run_log(paths).attempts() == (AttemptSpan(number=3, start=T0, end=T0 + 1),)
    assert said_of(paths) == ("run.errored", "ERRORED", "ERRORED", "ERRORED", "ERRORED")


@pytest.mark.parametrize("event", ["run.placed", "checkpoint.committed"])
def test_an_attempt_that_no_run_counts_to_is_none(ended, event):
    """One damaged line: a run that was FINISHED had not ended for any tool, and its command began it again."""
    config = RunConfig(experiment_name="e", trial_name="t")
    finished = {"event": "run.finished", "total_train_epochs": config.total_train_epochs, "attempt": 1}
    paths = ended({"event": "run.started", "attempt": 1}, {"event": event, "attempt": 10**12}, finished)
    assert said_of(paths) == ("run.finished", "FINISHED", "FINISHED", "FINISHED", "FINISHED")
    assert "is FINISHED" in already_finished(config, paths)


def test_a_run_that_a_person_took_back_is_not_finished_any_more(ended):
    config = RunConfig(experiment_name="e", trial_name="t")
    finished = {"event": "run.finished", "total_train_steps": None, "total_train_epochs": config.total_train_epochs}
    assert "is FINISHED" in already_finished(config, ended("run.started", finished))
    assert already_finished(config, ended("run.started", finished, "recovery.taken")) == ""
    assert already_finished(config, ended("recovery.taken", "run.started", finished)) != ""
    assert already_finished(config, ended("run.started", finished, "run.started")) == ""


def test_numbers_that_no_machine_counts_to_are_none(ended, capsys):
    paths = ended({"event": "run.started"}, {"event": "run.errored", "exit_code": 2**60, "global_step": 2**60})
    assert close_as_recorded(paths, last_end(paths)) == 3
    assert str(2**60) not in capsys.readouterr().out
