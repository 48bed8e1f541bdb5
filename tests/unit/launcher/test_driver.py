"""Whatever happens to a launch, it ends with a status and its reason, and the journal has it (P9)."""

import contextlib
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError, RayTaskError

from launcher import driver
from launcher.base.errors import ResourceError, RolloutError, TrainerError
from launcher.base.messages import TerminalStatus
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
    assert outcome.next_command.startswith("python -m launcher")
    last = list(read_lines(paths.events))[-1]
    assert last["event"] == f"run.{status.lower()}"
    assert last["reason"] == outcome.reason


class Trainer:
    """Its snapshot is asked for, and `ray.get` of the reference fails as the test wants."""

    class snapshot:
        @staticmethod
        def remote(since):
            return "a reference"


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """A launch whose actors exist; `lines` is what its screen shows, `raises` what comes of each snapshot."""
    config = RunConfig(experiment_name="view", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    lines = []
    screen = SimpleNamespace(line=lines.append)
    launch = RunLaunch(config, paths, Journal(paths.events, 1, time.time), screen)
    launch._actors = SimpleNamespace(trainer=Trainer, follow=lambda event: None)
    launch._screen.milestone = lines.append
    launch.lines, launch.raises = lines, []

    def answer(reference):
        raise launch.raises.pop(0)

    monkeypatch.setattr(driver.ray, "wait", lambda waited, timeout: (waited, []))
    monkeypatch.setattr(driver.ray, "get", answer)
    return launch


def task_error(cause):
    return RayTaskError("snapshot", "a traceback", cause)


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("killed by the memory monitor"),  # which is no RayActorError
        task_error(TrainerError("the trainer has not started")),
    ],
)
def test_a_snapshot_that_can_not_be_had_yet_does_not_end_the_run(launch, error):
    launch.raises = [error]
    launch._show()
    assert launch._look is None  # and it is asked again
    assert launch.lines == []


def test_a_snapshot_that_fails_by_a_defect_is_reported_once(launch):
    launch.raises = [task_error(KeyError("phase")), task_error(KeyError("phase")), task_error(KeyError("other"))]
    for _ in range(3):
        launch._show()
    assert [line for line in launch.lines if "snapshot failed" in line] == [
        "the display is out of date: the trainer's snapshot failed: KeyError('phase') (this is a defect)",
        "the display is out of date: the trainer's snapshot failed: KeyError('other') (this is a defect)",
    ]
    reasons = [
        line["reason"] for line in read_lines(launch._paths.events) if line["event"] == "trainer.snapshot_failed"
    ]
    assert reasons == ["KeyError('phase')", "KeyError('other')"]
