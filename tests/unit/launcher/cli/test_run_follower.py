"""What the driver shows of a run: a snapshot that can't be had ends nothing, and a defect is told once."""

import time
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError, RayTaskError

from launcher.base.errors import TrainerError
from launcher.cli import run_follower
from launcher.cli.run_follower import RunFollower
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.reporting.current_status import CurrentStatusFile
from launcher.resources.seen_memory import SeenMemory
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_paths import RunPaths


class Trainer:
    """Its snapshot is asked for, and `ray.get` of the reference fails as the test wants."""

    class snapshot:
        @staticmethod
        def remote(since):
            return "a reference"


@pytest.fixture
def follower(tmp_path, monkeypatch):
    """Of a run whose actors exist; `lines` is what its screen shows, `raises` what comes of each snapshot."""
    config = RunConfig(experiment_name="view", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    lines = []
    screen = SimpleNamespace(line=lines.append, milestone=lines.append)
    now = CurrentStatusFile(paths, 1, address="local", is_detached=False)
    deadlines = SimpleNamespace(follow=lambda event: None)
    journal = Journal(paths.events, 1, time.time)
    memory = SeenMemory(None, journal)
    follower = RunFollower(paths, journal, screen, now, memory, deadlines)
    follower.actors = SimpleNamespace(trainer=Trainer, follow=lambda event: None)
    follower.paths, follower.lines, follower.raises = paths, lines, []

    def answer(reference):
        raise follower.raises.pop(0)

    monkeypatch.setattr(run_follower.ray, "wait", lambda waited, timeout: (waited, []))
    monkeypatch.setattr(run_follower.ray, "get", answer)
    return follower


def task_error(cause):
    return RayTaskError("snapshot", "a traceback", cause)


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("killed by the memory monitor"),  # which is no RayActorError
        task_error(TrainerError("the trainer has not started")),
    ],
)
def test_a_snapshot_that_can_not_be_had_yet_does_not_end_the_run(follower, error):
    follower.raises = [error]
    follower.show()
    assert follower._look is None  # and it is asked again
    assert follower.lines == []


def test_a_snapshot_that_fails_by_a_defect_is_reported_once(follower):
    follower.raises = [task_error(KeyError("phase")), task_error(KeyError("phase")), task_error(KeyError("other"))]
    for _ in range(3):
        follower.show()
    assert [line for line in follower.lines if "snapshot failed" in line] == [
        "the display is out of date: the trainer's snapshot failed: KeyError('phase') (this is a defect)",
        "the display is out of date: the trainer's snapshot failed: KeyError('other') (this is a defect)",
    ]
    reasons = [
        line["reason"] for line in read_lines(follower.paths.events) if line["event"] == "trainer.snapshot_failed"
    ]
    assert reasons == ["KeyError('phase')", "KeyError('other')"]
