"""Whatever happens to a launch, it ends with a status and its reason, and the journal has it (P9)."""

import contextlib
import dataclasses
import threading
import time
from types import SimpleNamespace

import pytest

from actors.cluster import ray_cluster
from actors.cluster.ray_cluster import VitalProcesses
from launcher import driver
from launcher.base.errors import DataError, ResourceError, RolloutError, RunError
from launcher.base.exit_codes import RESUMES
from launcher.base.messages import Cause, RunOutcome, TerminalStatus
from launcher.base.own_python import python
from launcher.cli.attempt_incidents import begin_incident, begin_memory, last_committed
from launcher.cli.interrupts import NoInterrupts
from launcher.cli.keeper import DriverTask, read_again
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.driver import AttemptEnded, RunLaunch
from launcher.policy.next_attempt import BeginAgain
from launcher.reporting import current_status
from launcher.run_files.journal import Journal, append_line, read_lines
from launcher.run_files.run_ends import ENDS
from launcher.run_files.run_memory import memory_file
from launcher.run_files.run_paths import RunPaths


class Silent:
    def milestone(self, text):
        pass

    def line(self, text):
        pass


@pytest.mark.parametrize(
    ("happens", "status", "exit_code", "reason"),
    [
        (RuntimeError("the unforeseen"), TerminalStatus.ERRORED, None, "the unforeseen"),
        (RolloutError("no server", "look there"), TerminalStatus.ERRORED, 3, "no server"),
        (ResourceError("no port", "choose one"), TerminalStatus.ERRORED, 2, "choose one"),
        (KeyboardInterrupt(), TerminalStatus.ABORTED, None, "ended by the user"),
    ],
)
def test_every_launch_ends_with_a_status(tmp_path, monkeypatch, happens, status, exit_code, reason):
    config = RunConfig(experiment_name="status", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()

    @contextlib.contextmanager
    def breaks(*_, **__):
        raise happens
        yield

    monkeypatch.setattr(driver, "ray_cluster", breaks)
    outcome = RunLaunch(config, paths, Journal(paths.events, 1, time.time), Silent()).run()
    assert outcome.status is status
    assert outcome.exit_code == exit_code
    assert reason in outcome.reason
    assert outcome.next_command.startswith(f"{python()} -m launcher")
    last = list(read_lines(paths.events))[-1]
    assert last["event"] == f"run.{status.lower()}"
    assert last["reason"] == outcome.reason


def test_an_end_that_its_disk_does_not_take_is_said_while_the_command_waits_for_it(tmp_path, monkeypatch):
    """After Ctrl-C on a disk that stalled the command stood there, its actors ended, and said nothing."""
    monkeypatch.setattr(driver, "STALLED_S", 0.05)
    config = RunConfig(experiment_name="status", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    said, is_said = [], threading.Event()
    screen = SimpleNamespace(line=lambda text: said.append(text) or is_said.set())
    launch = RunLaunch(config, paths, Journal(paths.events, 1, time.time), screen)
    monkeypatch.setattr(launch, "_journal", SimpleNamespace(record=lambda *_, **__: is_said.wait(60)))
    launch._end_actors(is_reachable=True)
    assert said == [f"{paths.events} does not take the run's end: the command waits for its disk"]


@pytest.mark.parametrize(
    ("asked", "deadline", "exit_code", "reason"),
    [
        (True, "", None, "ended by the user, at once"),
        (False, "run.walltime ends in 9 s", RESUMES, "run.walltime ends in 9 s"),
    ],
)
def test_a_stop_is_heard_while_ray_does_not_start(tmp_path, monkeypatch, asked, deadline, exit_code, reason):
    config = RunConfig(experiment_name="status", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    interrupts = NoInterrupts()
    launch = RunLaunch(config, paths, Journal(paths.events, 1, time.time), Silent(), interrupts=interrupts)
    tries = []

    def connect(*_, **__):
        tries.append(None)
        if len(tries) == 2:
            interrupts._count = int(asked)
            launch._deadlines.reason = deadline
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 - as Ray does

    monkeypatch.setattr(ray_cluster, "_connect", connect)
    outcome = launch.run()
    assert (outcome.status, outcome.exit_code, outcome.reason) == (TerminalStatus.ABORTED, exit_code, reason)
    assert len(tries) == 2
    assert [event["reason"] for event in read_lines(paths.events) if event["event"] == "run.aborted"] == [reason]


def test_a_run_whose_removed_folder_another_has_begun_in_ends(tmp_path, monkeypatch):
    """It went on: its lines were in the other's ledger, its checkpoints among the other's."""
    config = RunConfig(experiment_name="status", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    launch = RunLaunch(config, paths, Journal(paths.events, 1, time.time), Silent())
    monkeypatch.setattr(launch, "_create", lambda vital: SimpleNamespace(run=Asked(), ping=Asked()))
    monkeypatch.setattr(driver, "ray_cluster", lambda *_, **__: contextlib.nullcontext(Whole()))
    monkeypatch.setattr(driver, "ray", SimpleNamespace(wait=lambda *_, **__: ([], [])))
    launch._now.another = f"pid 4711, of {paths.logs.name},"
    monkeypatch.setattr(current_status, "held_by_another", lambda *_: launch._now.another)  # each write looks anew
    outcome = launch.run()
    assert outcome.status is TerminalStatus.ERRORED
    assert outcome.reason.endswith(f"another began there: pid 4711, of trial0, holds {paths.lock}")


class Asked:
    def remote(self):
        return None


class Whole:
    """Ray's own processes, none of which is lost."""

    def lost(self):
        return ""


def test_a_run_whose_next_attempt_is_refused_ends_with_a_status(tmp_path, monkeypatch):
    config = RunConfig(experiment_name="status", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    journal = Journal(paths.events, 1, time.time)
    journal.record("run.started", reason="fresh")
    begin_memory(paths, 1)
    memory = memory_file(paths).read(1)
    memory.incidents.begin(1, Cause.SERVER_CRASH, "server-0", time.monotonic())
    memory_file(paths).write(memory)

    def refuses(*_, **__):
        raise DataError("mine.jsonl:7: the record has no answer", "repair it")

    monkeypatch.setattr(driver, "check_data", refuses)
    task = task_after(paths, Cause.DRIVER_LOST)
    with pytest.raises(RunError, match="the record has no answer"):
        driver.run(config, task=task, interrupts=NoInterrupts())  # pytest's own stay
    last = list(read_lines(paths.events))[-1]
    assert (last["event"], last["exit_code"], last["attempt"]) == ("run.errored", 3, 1)
    assert "mine.jsonl:7" in last["reason"]
    ended = [event for event in read_lines(paths.events) if event["event"] == "incident.ended"]
    assert [(one["incident"], one["is_mended"]) for one in ended] == [(1, False)]
    left = memory_file(paths).last().incidents
    assert not left.open, "the next attempt does not end it again"
    assert not left.left_open, "the next attempt does not end it again"
    assert "mine.jsonl:7" in paths.report.read_text()


# ── attempts that end for another one ──


def task_after(paths, cause, *, not_before=0.0):
    before = None
    if cause is not None:
        before = BeginAgain(
            cause=cause, reason="it was lost", doing="another begins", began=1.0, not_before=not_before, times=2
        )
    return DriverTask(
        logs=str(paths.logs), words=[], path=[], began=time.monotonic(), first_attempt=1, lock=-1, before=before
    )


class Attempt:
    """One attempt of a run, whose cluster lives as long as the test wants; `ends` is what `_watch` does."""

    def __init__(self, folder, monkeypatch, ends, *, mode="auto", cause=None, not_before=0.0, steps=1):
        config = RunConfig(experiment_name="again", train_dataset=DatasetConfig(path="none"))
        config.cluster.fileroot = str(folder)
        config.recover.mode = mode
        self.paths = RunPaths.of(config)
        self.paths.prepare()
        self.journal = Journal(self.paths.events, 2, time.time)
        if steps:
            append_line(self.paths.ledger, {"global_step": 41, "attempt": steps})
        begin_memory(self.paths, 2)
        task = task_after(self.paths, cause, not_before=not_before)
        incident = None if cause is None else begin_incident(self.journal, self.paths, task.before)
        self.lines = []
        self.interrupts = NoInterrupts()
        monkeypatch.setattr(driver, "end_leftovers", lambda **_: [])  # they would be pytest's siblings
        screen = SimpleNamespace(
            line=self.lines.append, milestone=self.lines.append, alert=lambda *_: None, follow=lambda _: None
        )
        self.launch = RunLaunch(
            config, self.paths, self.journal, screen, interrupts=self.interrupts, task=task, incident=incident
        )
        vital = VitalProcesses("GRPO_CLUSTER=nobody bears it", folder)
        vital.lost = lambda: LOST
        monkeypatch.setattr(driver, "ray_cluster", lambda *_, **__: contextlib.nullcontext(vital))
        monkeypatch.setattr(self.launch, "_create", lambda vital: None)
        monkeypatch.setattr(self.launch, "_watch", lambda coordinator, vital: ends())

    def events(self, name):
        return [event for event in read_lines(self.paths.events) if event["event"] == name]


LOST = "Ray's own process raylet ended (by SIGKILL), and with it all that it ran"
HALTED = RunOutcome(status=TerminalStatus.ERRORED, reason="trainer_crash of trainer again", may_pass=True)


def loses():
    raise RunError(LOST, "the same command resumes")


def halts():
    return HALTED


@pytest.mark.parametrize(
    ("ends", "cause", "reason", "logs"),
    [
        (loses, Cause.CLUSTER_LOST, LOST, ["gcs_server", "raylet"]),
        (halts, Cause.RUN_HALTED, HALTED.reason, []),
    ],
)
def test_an_attempt_that_another_may_follow_says_so_and_records_no_end(
    tmp_path, monkeypatch, ends, cause, reason, logs
):
    attempt = Attempt(tmp_path, monkeypatch, ends)
    with pytest.raises(AttemptEnded):
        attempt.launch.run()
    again = read_again(attempt.paths.again)
    assert (again.cause, again.reason, sorted(again.logs)) == (cause, reason, logs)
    assert again.began <= time.monotonic()
    assert not {event["event"] for event in read_lines(attempt.paths.events)} & set(ENDS)


@pytest.mark.parametrize(
    ("ends", "kind"),
    [
        (halts, {"mode": "off"}),
        (halts, {"steps": 0}),
        (lambda: RunOutcome(status=TerminalStatus.ERRORED, reason=HALTED.reason), {}),
        (loses, {"mode": "off"}),
    ],
)
def test_where_none_may_follow_the_run_ends(tmp_path, monkeypatch, ends, kind):
    """What never worked under this command may never work: it has taken no step, or resumes nothing."""
    attempt = Attempt(tmp_path, monkeypatch, ends, **kind)
    outcome = attempt.launch.run()
    assert outcome.status is TerminalStatus.ERRORED
    assert outcome.reason.startswith(LOST if ends is loses else HALTED.reason)
    assert not attempt.paths.again.exists()


def test_what_has_never_taken_a_step_under_this_command_is_not_begun_anew(tmp_path, monkeypatch):
    """Its settings may never work. The steps of an earlier command show nothing of this one's."""
    attempt = Attempt(tmp_path, monkeypatch, halts)
    attempt.launch._task = dataclasses.replace(attempt.launch._task, first_attempt=2)
    assert attempt.launch.run().reason == HALTED.reason
    assert not attempt.paths.again.exists()


@pytest.mark.parametrize("ends", [loses, halts])
def test_one_that_was_asked_to_end_is_not_followed(tmp_path, monkeypatch, ends):
    attempt = Attempt(tmp_path, monkeypatch, ends)
    attempt.interrupts._count = 1
    outcome = attempt.launch.run()
    assert not attempt.paths.again.exists()
    assert outcome.reason == (f"ended by the user; {LOST}" if ends is loses else HALTED.reason)


def test_a_disk_that_takes_no_request_ends_the_run_with_a_status(tmp_path, monkeypatch):
    attempt = Attempt(tmp_path, monkeypatch, halts)
    attempt.paths.again.mkdir()
    outcome = attempt.launch.run()
    assert outcome.status is TerminalStatus.ERRORED
    assert outcome.reason.startswith(f"{HALTED.reason}; {attempt.paths.again} can't be written")


@pytest.mark.parametrize(
    ("cause", "event", "subject"),
    [
        (Cause.CLUSTER_LOST, "cluster.restarted", "cluster"),
        (Cause.RUN_HALTED, "attempt.begun_anew", "run"),
        (Cause.DRIVER_LOST, "driver.restarted", "driver"),
    ],
)
def test_an_attempt_in_place_of_another_is_one_incident(tmp_path, monkeypatch, cause, event, subject):
    attempt = Attempt(
        tmp_path, monkeypatch, lambda: RunOutcome(status=TerminalStatus.FINISHED, reason="done"), cause=cause
    )
    assert attempt.launch.run().status is TerminalStatus.FINISHED
    (began,), (begun,) = attempt.events("incident.began"), attempt.events(event)
    assert (began["incident"], began["cause"], began["subject"], began["at"]) == (1, cause, subject, 1.0)
    assert (began["reason"], began["doing"]) == ("it was lost", "another begins")
    assert (begun["incident"], begun["subject"], begun["global_step"]) == (1, subject, 41)
    assert begun["seconds"] > 0
    assert begun.get("times") == (2 if cause is Cause.DRIVER_LOST else None)
    assert len([line for line in attempt.lines if line.startswith("incident 1: ")]) == 1
    assert (attempt.paths.incident(1) / "incident.json").exists()


@pytest.mark.parametrize(
    ("asked", "deadline", "exit_code", "reason"),
    [
        (1, "", None, "ended by the user, before another attempt was begun"),
        (0, "run.walltime ends in 9 s", RESUMES, "run.walltime ends in 9 s"),
    ],
)
def test_who_waits_to_begin_obeys_signals_and_deadlines(tmp_path, monkeypatch, asked, deadline, exit_code, reason):
    attempt = Attempt(tmp_path, monkeypatch, halts, cause=Cause.RUN_HALTED, not_before=time.monotonic() + 1e6)
    attempt.interrupts._count = asked
    attempt.launch._deadlines.reason = deadline
    outcome = attempt.launch.run()
    assert (outcome.status, outcome.exit_code, outcome.reason) == (TerminalStatus.ABORTED, exit_code, reason)


def test_an_incident_gets_the_next_number(tmp_path, monkeypatch):
    attempt = Attempt(tmp_path, monkeypatch, halts)
    attempt.journal.record("incident.began", incident=6)
    attempt.paths.run_memory.unlink()  # as of a run that an older version began
    begin_memory(attempt.paths, 2)
    task = task_after(attempt.paths, Cause.CLUSTER_LOST)
    assert begin_incident(attempt.journal, attempt.paths, task.before)["incident"] == 7


def test_of_the_ledger_the_last_line_counts(tmp_path, monkeypatch):
    paths = Attempt(tmp_path, monkeypatch, halts, steps=0).paths
    assert last_committed(paths) is None
    for step in (7, 8, 3):
        append_line(paths.ledger, {"global_step": step})
    assert last_committed(paths) == 3
    for line in ({"of": "another program"}, {"global_step": "9"}, {"global_step": 10**30}):
        append_line(paths.ledger, line)
    assert last_committed(paths) == 3, "these are of no step"
