"""The HealthMonitor's answer to the Coordinator waits for a change, not longer than it may."""

import asyncio
from types import SimpleNamespace

import pytest

from actors.monitoring.health_monitor_actor import HealthMonitorActor
from actors.monitoring.monitor_view import MonitorView

HELD_S = 1000.0
DEADLINE_S = 60.0


def actor():
    made = object.__new__(HealthMonitorActor.__ray_metadata__.modified_class)
    made._journal, made._beginning = None, asyncio.Lock()
    made._monitor = SimpleNamespace(
        changed=asyncio.Event(), watch=lambda targets, is_starting: None, view=lambda: MonitorView(servers=())
    )
    return made


@pytest.mark.parametrize("by_another", [False, True])
async def test_it_is_held_until_a_verdict_changes_or_another_asks_now(by_another):
    monitor = actor()
    held = asyncio.create_task(monitor.watch([], None, False, HELD_S))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not held.done()
    if by_another:
        await monitor.watch([])
    else:
        monitor._monitor.changed.set()
    async with asyncio.timeout(DEADLINE_S):
        assert (await held).servers == ()


async def test_what_changed_between_two_questions_is_told_at_once_and_only_once():
    monitor = actor()
    monitor._monitor.changed.set()
    async with asyncio.timeout(DEADLINE_S):
        await monitor.watch([], None, False, HELD_S)
    assert not monitor._monitor.changed.is_set()
    await monitor.watch([], None, False, 0.001)
