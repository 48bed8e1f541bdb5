"""What the Coordinator is told of one server, from what its actor and the trainer's pool say."""

import asyncio
import time
from dataclasses import replace

import pytest
from ray.exceptions import ActorUnavailableError

from actors.supervision import server_handle
from actors.supervision.server_handle import ServerHandle
from launcher.base.errors import ServerError
from launcher.base.messages import Cause, Health, ServerInfo, ServerState, Verdict
from launcher.policy.exit_cause import RanOut
from tests.support.machine import all_turns
from tests.support.worlds.supervision import WEIGHTS, FakeActor, facts, handle


def in_pool(state, *, generation=0, version=3, lineage=1):
    return ServerInfo(
        name="server-0", index=0, generation=generation, state=state, weight_version=version, lineage=lineage
    )


async def test_a_started_server_is_stale_until_the_trainer_has_admitted_this_life():
    async with handle() as (slot, _, _):
        await slot.start(0, WEIGHTS, {})
        fresh, of_before = facts(slot), facts(slot, in_pool(ServerState.READY, generation=-1))
        admitted = facts(slot, in_pool(ServerState.READY))
    assert (fresh.state, fresh.weight_version, fresh.lineage) == (ServerState.STALE, 3, 1)
    assert of_before.state is ServerState.STALE
    assert admitted.state is ServerState.READY


async def test_its_end_is_told_once_with_its_cause():
    async with handle() as (slot, actor, died):
        await slot.start(0, WEIGHTS, {})
        actor.end("ended by itself: torch.OutOfMemoryError: CUDA out of memory", exit_code=1)
        while not died:
            await asyncio.sleep(0)
        seen = facts(slot, in_pool(ServerState.READY))
    assert (seen.state, seen.verdict.cause, seen.ran_out) == (
        ServerState.DEAD,
        Cause.SERVER_OOM,
        RanOut.SERVER_DEVICE,
    )
    assert len(died) == 1


async def test_an_actor_that_ray_started_anew_has_lost_its_server():
    async with handle() as (slot, actor, _):
        await slot.start(0, WEIGHTS, {})
        actor.generation, actor.state = -1, ServerState.STOPPED
        await slot.probe.refresh()
        seen = facts(slot, in_pool(ServerState.READY))
    assert (seen.state, seen.verdict.health, seen.verdict.cause) == (
        ServerState.DEAD,
        Health.DEAD,
        Cause.SERVER_CRASH,
    )


async def test_one_that_does_not_become_ready_is_dead_with_what_its_log_said():
    refused = ServerError("server-0 did not become ready: it ended: Please increase --mem-fraction-static")
    async with handle(ready=refused) as (slot, _, _):
        with pytest.raises(ServerError):
            await slot.start(0, WEIGHTS, {})
        seen = facts(slot)
    assert (seen.state, seen.ran_out) == (ServerState.DEAD, RanOut.SERVER_POOL_TOO_SMALL)


async def test_loading_the_next_version_is_no_fault_of_one_that_was_ready():
    async with handle() as (slot, _, _):
        await slot.start(0, WEIGHTS, {})
        before = facts(slot, in_pool(ServerState.READY))
        during = facts(slot, in_pool(ServerState.STALE), is_publishing=True)
        after = facts(slot, in_pool(ServerState.STALE))
        assert [before.state, during.state, after.state] == [ServerState.READY, ServerState.READY, ServerState.STALE]


async def test_why_the_trainer_doubts_its_weights_is_known_while_it_is_stale():
    why = "POST http://server-0/update_weights_from_disk: the connection broke off"
    async with handle() as (slot, _, _):
        await slot.start(0, WEIGHTS, {})
        stale, ready = (
            facts(slot, replace(in_pool(state), reason=why)) for state in (ServerState.STALE, ServerState.READY)
        )
    assert (stale.stale_reason, ready.stale_reason) == (why, "")


async def test_a_verdict_of_the_monitor_counts_for_one_that_lives():
    async with handle() as (slot, _, _):
        await slot.start(0, WEIGHTS, {})
        hung = Verdict(health=Health.DEAD, reason="two of three", cause=Cause.SERVER_HANG)
        assert facts(slot, in_pool(ServerState.READY), hung).verdict.cause is Cause.SERVER_HANG


GONE = Verdict(health=Health.DEAD, reason="its process 7 is gone", cause=Cause.SERVER_CRASH)


async def test_of_one_that_is_gone_the_reason_is_waited_for_and_decides():
    async with handle() as (slot, actor, died):
        await slot.start(0, WEIGHTS, {})
        before = facts(slot, in_pool(ServerState.READY), GONE).verdict
        actor.end("ended by itself: torch.OutOfMemoryError: CUDA out of memory", exit_code=1)
        while not died:
            await asyncio.sleep(0)
        after = facts(slot, in_pool(ServerState.READY), GONE).verdict
    assert (before.health, after.health, after.cause) == (Health.SUSPECT, Health.DEAD, Cause.SERVER_OOM)


async def test_the_reason_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(server_handle, "REASON_S", 0.0)
    async with handle() as (slot, _, _):
        await slot.start(0, WEIGHTS, {})
        assert facts(slot, in_pool(ServerState.READY), GONE).verdict == GONE


@pytest.mark.parametrize(("was_told", "deaths"), [(False, 1), (True, 0)])
async def test_a_death_that_its_guard_notices_after_the_order_to_restart_it_is_told(was_told, deaths):
    async with handle() as (slot, actor, died):
        await slot.start(0, WEIGHTS, {})
        await slot.stop()
        actor.end("ended by SIGKILL", at=time.monotonic(), was_told=was_told)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(died) == deaths


async def test_an_end_is_told_also_after_the_question_for_it_failed_once(monkeypatch):
    """A call that Ray lost: without another question a crash would have no `server.died` and no exit code."""
    monkeypatch.setattr(server_handle, "LOOK_S", 0.005)
    async with handle() as (slot, actor, died):
        wait_exit, asked = actor.wait_exit.remote, []

        async def lost_once():
            asked.append(1)
            if len(asked) == 1:
                raise ActorUnavailableError("the connection was reset", None)
            return await wait_exit()

        actor.wait_exit.remote = lost_once
        await slot.start(0, WEIGHTS, {})
        while not asked:
            await asyncio.sleep(0)
        actor.end("ended by SIGSEGV", exit_code=-11)
        for _ in range(200):
            if died:
                break
            await asyncio.sleep(0.005)
        assert ([end.exit_code for end in died], facts(slot).state) == ([-11], ServerState.DEAD)


async def test_whoever_was_started_anew_is_not_asked_for_the_end_of_an_earlier_incarnation(monkeypatch):
    monkeypatch.setattr(server_handle, "LOOK_S", 0.0)  # nobody waits between two questions
    async with handle() as (slot, actor, _):
        asked = []

        async def gone():
            asked.append(1)
            raise ActorUnavailableError("it has died", None)

        actor.wait_exit.remote = gone
        await slot.start(0, WEIGHTS, {})
        while len(asked) < 2:
            await asyncio.sleep(0)
        await slot.stop()
        await all_turns()
        before = len(asked)
        await all_turns()
        assert len(asked) == before


@pytest.mark.parametrize(
    ("generation", "ordered", "said"),
    [
        (2, 3, "generation 3 was ordered and never begun: its actor has generation 2, READY"),
        (-1, 3, "its actor's process ended, and the server with it"),
        (-1, 0, "its actor has begun no server: the order never reached it, or its process ended"),
    ],
)
async def test_an_order_that_died_with_its_coordinator_is_no_end_of_the_actor(generation, ordered, said):
    """Killed between the journal's line and the call: the successor said that a living actor's process had ended."""
    actor = FakeActor()
    actor.generation, actor.state = generation, ServerState.READY
    slot = ServerHandle("server-0", actor, died=lambda end: None, changed=asyncio.Event(), setup_s=60.0)
    slot.adopt(ordered, 1)
    await slot.probe.refresh()
    verdict = slot.facts(None, None, is_publishing=False).verdict
    assert (verdict.health, verdict.cause, verdict.reason) == (Health.DEAD, Cause.SERVER_CRASH, said)
    await slot.close()


@pytest.mark.parametrize(("was_told", "deaths"), [(True, [1]), (False, [0, 1])])
async def test_an_end_that_an_earlier_coordinator_ordered_is_no_death_and_the_next_one_is_watched(
    was_told, deaths, monkeypatch
):
    """Killed while it had the server replaced: its successor told the ordered end as a death, and asked no more."""
    monkeypatch.setattr(server_handle, "LOOK_S", 0.0)  # nobody waits between two questions
    async with handle() as (slot, actor, died):
        actor.generation, actor.state = 0, ServerState.READY
        slot.adopt(1, 1)
        await slot.probe.refresh()
        await asyncio.sleep(0)
        actor.end("told to stop", at=time.monotonic(), was_told=was_told)
        await all_turns()
        actor.exited = asyncio.get_running_loop().create_future()
        actor.generation, actor.state = 1, ServerState.READY
        await slot.probe.refresh()
        await all_turns()
        actor.end("ended by SIGSEGV", exit_code=-11)
        async with asyncio.timeout(10):
            while facts(slot).state is not ServerState.DEAD or not died:
                await asyncio.sleep(0.001)
        assert sorted({end.generation for end in died}) == deaths
