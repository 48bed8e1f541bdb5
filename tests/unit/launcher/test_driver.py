"""Whatever happens to a launch, it ends with a status and its reason, and the journal has it (P9)."""

import contextlib
import time

import pytest

from launcher import driver
from launcher.base.errors import ResourceError, RolloutError
from launcher.base.messages import TerminalStatus
from launcher.base.own_python import python
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
