"""A door that never answers, from the question to how the attempt ends; and while a disk is in trouble."""

import asyncio
import errno
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from actors.foreign import fleet
from actors.foreign.command_cluster import CommandCoordinator
from actors.foreign.fleet import FleetObserver
from actors.supervision import trainer_handle
from actors.supervision.oom_backoff import OomBackoff
from launcher.base.disk_faults import DiskFault
from launcher.base.messages import TerminalStatus
from launcher.config.schema import RunConfig, SGLangConfig
from launcher.policy.disk_health import DiskTrouble
from launcher.run_files.run_paths import RunPaths
from tests.support.fake_actors import FakeActor, never
from tests.support.machine import scaled
from tests.support.run_memory import history_of
from tests.support.worlds.door import stepping

SILENCE_S = 0.05


class Stepping(SimpleNamespace):
    """In the place of a CommandTrainer."""

    async def halt(self, *, reinstates):
        self.halted.append(reinstates)

    async def close(self):
        """Nothing of it runs."""


def refuse():
    taken = OSError(errno.EADDRINUSE, "Address already in use")
    raise RayTaskError(function_name="view", traceback_str="", cause=taken)


class Behind:
    """A command without servers yet, in front of `door`."""

    def __init__(self, folder, monkeypatch, door):
        monkeypatch.setattr(trainer_handle, "ANSWER_S", 0.01)
        monkeypatch.setattr(trainer_handle, "LOOK_S", 0.01)
        monkeypatch.setattr(fleet, "ray", SimpleNamespace(kill=lambda actor, no_restart: None))
        self.config = RunConfig(experiment_name="behind", sglang=SGLangConfig(n_servers=0))
        self.config.cluster.fileroot = str(folder / "runs")
        self.config.health.monitor_silence_s = SILENCE_S
        paths = RunPaths.of(self.config)
        paths.prepare()
        history = history_of(paths.events)
        history.begin("the test")
        memory = OomBackoff(self.config, history, None, on_gpu=False, shares_gpu=False)
        alone = {"servers": {}, "monitor": None, "memory": memory}
        self.fleet = FleetObserver(self.config, paths, history, trainer=FakeActor(view=door), **alone)
        self.trainer = Stepping(
            incident=None,
            pid=0,
            next_step=0,
            stop_s=0.0,
            report_every=1,
            progress=SimpleNamespace(at=lambda subject: None),
            facts=stepping,
            begin=lambda: None,
            halted=[],
        )
        parts = (self.config, paths, history, self.trainer)
        self.coordinator = CommandCoordinator(*parts, changed=self.fleet.changed, fleet=self.fleet)


@pytest.mark.parametrize(
    ("door", "said"),
    [
        (never, "the door did not answer within 0.01 s"),
        (refuse, "the door failed: OSError(98, 'Address already in use')"),
    ],
    ids=["hangs", "its port is taken"],
)
async def test_a_door_that_never_answers_ends_the_attempt_with_what_it_said_last(tmp_path, monkeypatch, door, said):
    run = Behind(tmp_path, monkeypatch, door)
    async with asyncio.timeout(scaled(20.0)):
        outcome = await run.coordinator.supervise()
    assert (outcome.status, outcome.may_pass) == (TerminalStatus.ERRORED, True)
    assert outcome.reason.startswith("the Coordinator's questions to the door of the trainer's servers have had no ")
    assert f"; the last: {said}" in outcome.reason
    assert run.trainer.halted == [False]


async def test_while_a_disk_is_in_trouble_its_silence_does_not_count_until_the_patience_is_over(tmp_path, monkeypatch):
    """A disk that stalled for ten minutes ended a healthy command, and disk.patience_s promises a day."""
    run = Behind(tmp_path, monkeypatch, never)
    eyes = run.fleet
    since = time.monotonic()
    trouble = DiskTrouble(path="/runs", fault=DiskFault.STALLED, since=since, first=since)
    found = [trouble]
    monkeypatch.setattr(eyes.disks, "trouble", lambda *_, **__: found[0])

    async def silent_s():
        eyes.trainer.silence.seconds = 3600.0
        return (await eyes.observe_run(is_stopped=False)).door_silent_s

    assert await silent_s() == 0.0
    run.config.disk.patience_s = 0.0
    assert await silent_s() == 3600.0
    run.config.disk.patience_s = 3600.0
    found[0] = None
    assert await silent_s() == 3600.0
    await eyes.close()
