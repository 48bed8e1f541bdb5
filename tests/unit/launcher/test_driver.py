"""Whatever happens to a launch, it ends in a word with its reason, and the journal has it (P9)."""

import contextlib
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError

from launcher import driver
from launcher.base.errors import ResourceError, RolloutError
from launcher.base.messages import TerminalStatus
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.driver import RunLaunch
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_paths import RunPaths


class Silent:
    def line(self, text):
        pass


@pytest.mark.parametrize(
    ("happens", "word", "exit_code", "reason"),
    [
        (RuntimeError("the unforeseen"), TerminalStatus.ERRORED, None, "the unforeseen"),
        (RolloutError("no server", "look there"), TerminalStatus.ERRORED, 3, "no server"),
        (ResourceError("no port", "choose one"), TerminalStatus.ERRORED, 2, "choose one"),
        (KeyboardInterrupt(), TerminalStatus.ABORTED, None, "ended by the user"),
    ],
)
def test_every_launch_ends_in_a_word(tmp_path, monkeypatch, happens, word, exit_code, reason):
    config = RunConfig(experiment_name="word", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()

    @contextlib.contextmanager
    def breaks(*_, **__):
        raise happens
        yield

    monkeypatch.setattr(driver, "ray_cluster", breaks)
    outcome = RunLaunch(config, paths, 1, Journal(paths.events, 1, time.time), Silent()).run()
    assert outcome.word is word
    assert outcome.exit_code == exit_code
    assert reason in outcome.reason
    assert outcome.next_command.startswith("python -m launcher")
    last = list(read_lines(paths.events))[-1]
    assert last["event"] == f"run.{word.lower()}"
    assert last["reason"] == outcome.reason


class Trainer:
    """Its snapshot is never there: the process was ended for the machine's memory, which is no RayActorError."""

    class snapshot:
        @staticmethod
        def remote(since):
            return "a reference"


def test_a_view_of_the_run_that_can_not_be_had_does_not_end_the_run(tmp_path, monkeypatch):
    config = RunConfig(experiment_name="view", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    launch = RunLaunch(config, paths, 1, Journal(paths.events, 1, time.time), Silent())
    launch._actors = SimpleNamespace(trainer=Trainer)

    def killed(reference):
        raise OutOfMemoryError("killed by the memory monitor")

    monkeypatch.setattr(driver.ray, "wait", lambda waited, timeout: (waited, []))
    monkeypatch.setattr(driver.ray, "get", killed)
    launch._show()
    assert launch._look is None  # and it is asked again
