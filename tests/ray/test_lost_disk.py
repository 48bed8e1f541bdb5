"""The disk of a run is lost: the same command resumes from the copy at its URL."""

import shutil

import pytest

from tests.programs.supervised_run import SupervisedRun
from tests.support.kept_runs import kill_command

pytestmark = pytest.mark.timeout(600)


def test_a_run_whose_disk_is_lost_goes_on_from_the_last_copy(tmp_path):
    url = [f"recover.url=file://{tmp_path}/far"]
    disk = tmp_path / "disk"
    disk.mkdir()
    with SupervisedRun(disk, steps=900, servers=1, settings=url) as run:
        run.wait_until(lambda: run.events("checkpoint.uploaded"), "a checkpoint was copied")
        run.wait_steps(run.steps_done() + 2)
        copied = max(event["global_step"] for event in run.events("checkpoint.uploaded"))
        kill_command(run.process.pid)
        run.process.wait()
    shutil.rmtree(disk)
    disk.mkdir()
    with SupervisedRun(disk, steps=copied + 4, servers=1, settings=url) as again:
        again.finish()
        (fetched,) = again.events("checkpoint.fetched")
        first = again.events("trainer.restored")[0]["global_step"]
        assert fetched["global_step"] == first >= copied
        steps = [line["global_step"] for line in again.ledger()]
        assert steps == list(range(first, copied + 4)), "the copy brings the line of its own step"
        last = again.events("checkpoint.uploaded")[-1]["global_step"]
        assert last == copied + 3, "the driver copies the last one"
