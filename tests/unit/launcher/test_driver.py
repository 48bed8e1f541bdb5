"""Whatever happens to a launch, it ends with a status and its reason, and the journal has it (P9)."""

import contextlib
import time
from types import SimpleNamespace

import pytest

from actors.cluster import ray_cluster
from actors.cluster.cluster_restarts import Continuation
from launcher import driver
from launcher.base.errors import DataError, ResourceError, RolloutError, RunError
from launcher.base.exit_codes import RESUMES
from launcher.base.messages import KilledDriver, TerminalStatus
from launcher.base.own_python import python
from launcher.cli.interrupts import NoInterrupts
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.driver import RunLaunch
from launcher.run_files.journal import Journal, read_lines
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
            interrupts._count, launch._deadlines.reason = int(asked), deadline
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


@pytest.mark.parametrize(
    ("known", "killed"),
    [
        (Continuation(incident=1, attempt=2, lost_at=1.0, begun=(1.0,), furthest=3, progress_at=None), None),
        (None, KilledDriver(how="SIGKILL", at=1.0, began=0.0, times=1, mark="")),
    ],
)
def test_a_run_whose_next_attempt_is_refused_ends_with_a_status(tmp_path, monkeypatch, known, killed):
    config = RunConfig(experiment_name="status", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    Journal(paths.events, 1, time.time).record("run.started", reason="fresh")

    def refuses(_):
        raise DataError("mine.jsonl:7: the record has no answer", "repair it")

    monkeypatch.setattr(driver, "check_data", refuses)
    monkeypatch.setattr(driver, "Interrupts", NoInterrupts)  # pytest's own stay
    with pytest.raises(RunError, match="the record has no answer"):
        driver.run(config, successor=SimpleNamespace(known=known, killed=killed))
    last = list(read_lines(paths.events))[-1]
    assert (last["event"], last["exit_code"], last["attempt"]) == ("run.errored", 3, 1 if known is None else 2)
    assert "mine.jsonl:7" in last["reason"]
    ended = [event for event in read_lines(paths.events) if event["event"] == "incident.ended"]
    assert [(one["incident"], one["is_mended"]) for one in ended] == ([] if known is None else [(1, False)])
    assert "mine.jsonl:7" in paths.report.read_text()
