"""The HealthMonitor's answer to the Coordinator waits for a change, not longer than it may."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from actors.monitoring import health_monitor
from actors.monitoring.health_monitor import HealthMonitorActor, MonitorReport
from actors.monitoring.reward_series import RewardSeries
from launcher.base.errors import StorageError
from launcher.config.schema import RunConfig
from tests.support.machine import scaled
from tests.support.worlds.health_monitor import batch

HELD_S = 1000.0
deadline_s = partial(scaled, 60.0)


def actor():
    made = object.__new__(HealthMonitorActor.__ray_metadata__.modified_class)
    made._journal = None
    made._beginning = asyncio.Lock()
    made._monitor = SimpleNamespace(changed=asyncio.Event(), watch=lambda servers: None, report=MonitorReport)
    return made


@pytest.mark.parametrize("by_another", [False, True])
async def test_it_is_held_until_a_verdict_changes_or_another_asks_now(by_another):
    monitor = actor()
    held = asyncio.create_task(monitor.watch({}, HELD_S))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not held.done()
    if by_another:
        await monitor.watch({})
    else:
        monitor._monitor.changed.set()
    async with asyncio.timeout(deadline_s()):
        assert (await held).servers == {}


async def test_what_changed_between_two_questions_is_told_at_once_and_only_once():
    monitor = actor()
    monitor._monitor.changed.set()
    async with asyncio.timeout(deadline_s()):
        await monitor.watch({}, HELD_S)
    assert not monitor._monitor.changed.is_set()
    await monitor.watch({}, 0.001)


async def test_no_question_is_answered_with_an_error_while_its_disk_does_not_give_its_past(paths, monkeypatch):
    """A monitor that Ray started anew at that moment: its error at the gate ended the step loop, as a defect."""
    monkeypatch.setattr(health_monitor, "READ_AGAIN_S", 0.001)
    monkeypatch.setattr(health_monitor, "bind_to_cluster", lambda config: None)
    paths.prepare()
    read, refused = RewardSeries.read, []

    def refuse(of, **how):
        refused.append(of)
        if len(refused) < 3:
            raise StorageError(f"{of.metrics} can't be read: Input/output error", "")
        return read(of, **how)

    monkeypatch.setattr(RewardSeries, "read", refuse)
    made = HealthMonitorActor.__ray_metadata__.modified_class(RunConfig(experiment_name="exp"), paths, 1)
    async with asyncio.timeout(deadline_s()):
        assert (await made.admit(batch(0))).admitted
    await (await made._ready()).close()
    assert len(refused) == 3
