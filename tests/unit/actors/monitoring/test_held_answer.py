"""The HealthMonitor's answer to the Coordinator waits for a change, not longer than it may."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from actors.monitoring import health_monitor_actor
from actors.monitoring.health_monitor_actor import HealthMonitorActor
from actors.monitoring.monitor_view import MonitorView
from launcher.base.errors import StorageError
from launcher.config.schema import RunConfig
from launcher.run_files.run_keys import ServerKeys
from tests.support.machine import scaled
from tests.support.worlds.health_monitor import batch

HELD_S = 1000.0
deadline_s = partial(scaled, 60.0)


def actor():
    made = object.__new__(HealthMonitorActor.__ray_metadata__.modified_class)
    made._journal, made._beginning = None, asyncio.Lock()
    made._monitor = SimpleNamespace(
        changed=asyncio.Event(), watch=lambda targets: None, view=lambda: MonitorView(servers=())
    )
    return made


@pytest.mark.parametrize("by_another", [False, True])
async def test_it_is_held_until_a_verdict_changes_or_another_asks_now(by_another):
    monitor = actor()
    held = asyncio.create_task(monitor.watch([], None, HELD_S))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not held.done()
    if by_another:
        await monitor.watch([])
    else:
        monitor._monitor.changed.set()
    async with asyncio.timeout(deadline_s()):
        assert (await held).servers == ()


async def test_what_changed_between_two_questions_is_told_at_once_and_only_once():
    monitor = actor()
    monitor._monitor.changed.set()
    async with asyncio.timeout(deadline_s()):
        await monitor.watch([], None, HELD_S)
    assert not monitor._monitor.changed.is_set()
    await monitor.watch([], None, 0.001)


async def test_no_question_is_answered_with_an_error_while_its_disk_does_not_give_the_keys(paths, monkeypatch):
    """A monitor that Ray started anew at that moment: its error at the gate ended the step loop, as a defect."""
    monkeypatch.setattr(health_monitor_actor, "READ_AGAIN_S", 0.001)
    monkeypatch.setattr(health_monitor_actor, "bind_to_cluster", lambda config: None)
    paths.prepare()
    ServerKeys.make(paths.keys)
    read, refused = ServerKeys.read_file, []

    def refuse(path):
        refused.append(path)
        if len(refused) < 3:
            raise StorageError(f"{path} can't be read: Input/output error", "")
        return read(path)

    monkeypatch.setattr(ServerKeys, "read_file", refuse)
    made = HealthMonitorActor.__ray_metadata__.modified_class(RunConfig(experiment_name="exp"), paths, 1)
    async with asyncio.timeout(deadline_s()):
        assert (await made.admit(batch(0))).admitted
    monitor = await made._ready()
    await monitor.close()
    await monitor._client.close()
    assert len(refused) == 3
