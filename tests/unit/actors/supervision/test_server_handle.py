"""What the Coordinator is told of one server, from what its actor and the trainer's pool say."""

from dataclasses import replace

import pytest

from actors.serving.server_report import ServerReport
from actors.supervision import server_handle
from launcher.base.errors import ServerError
from launcher.base.messages import Cause, Health, ServerInfo, ServerState, Verdict
from launcher.policy.exit_cause import RanOut
from tests.support.fake_actors import never
from tests.support.worlds.supervision import HUNG_AFTER_S, WEIGHTS, facts, handle

SILENT = Verdict(health=Health.UNKNOWN, reason="its actor does not answer")


def in_pool(state, *, generation=0, version=3, lineage=1):
    return ServerInfo(
        name="server-0", index=0, generation=generation, state=state, weight_version=version, lineage=lineage
    )


async def test_a_started_server_is_stale_until_the_trainer_has_admitted_this_life():
    slot, _, _ = handle()
    await slot.start(0, WEIGHTS, {})
    fresh, of_before = facts(slot), facts(slot, in_pool(ServerState.READY, generation=-1))
    admitted = facts(slot, in_pool(ServerState.READY))
    assert (fresh.state, fresh.weight_version, fresh.lineage) == (ServerState.STALE, 3, 1)
    assert of_before.state is ServerState.STALE
    assert admitted.state is ServerState.READY


async def test_its_end_is_told_once_with_its_cause():
    slot, actor, died = handle()
    await slot.start(0, WEIGHTS, {})
    actor.end("ended by itself: torch.OutOfMemoryError: CUDA out of memory", exit_code=1)
    actor.tell(slot)
    actor.tell(slot)
    seen = facts(slot, in_pool(ServerState.READY))
    assert (seen.state, seen.verdict.cause, seen.ran_out) == (
        ServerState.DEAD,
        Cause.SERVER_OOM,
        RanOut.SERVER_DEVICE,
    )
    assert len(died) == 1


async def test_an_actor_that_ray_started_anew_has_lost_its_server():
    slot, actor, _ = handle()
    await slot.start(0, WEIGHTS, {})
    actor.generation = -1
    actor.state = ServerState.STOPPED
    actor.tell(slot)
    seen = facts(slot, in_pool(ServerState.READY))
    assert (seen.state, seen.verdict.health, seen.verdict.cause) == (
        ServerState.DEAD,
        Health.DEAD,
        Cause.SERVER_CRASH,
    )


async def test_a_report_of_before_the_last_order_says_nothing_of_what_was_ordered():
    """On its way while the next incarnation was started: it looks like that of an actor that has lost its server."""
    slot, actor, died = handle()
    await slot.start(0, WEIGHTS, {})
    actor.end("killed")
    late = actor.seen(0)
    await slot.start(1, WEIGHTS, {})
    died.clear()
    slot.take_report(late)
    assert (facts(slot).state, died) == (ServerState.STALE, [])


async def test_one_that_does_not_become_ready_is_dead_with_what_its_log_said():
    refused = ServerError("server-0 did not become ready: it ended: Please increase --mem-fraction-static")
    slot, _, _ = handle(ready=refused)
    with pytest.raises(ServerError):
        await slot.start(0, WEIGHTS, {})
    seen = facts(slot)
    assert (seen.state, seen.ran_out) == (ServerState.DEAD, RanOut.SERVER_POOL_TOO_SMALL)


async def test_loading_the_next_version_is_no_fault_of_one_that_was_ready():
    slot, _, _ = handle()
    await slot.start(0, WEIGHTS, {})
    before = facts(slot, in_pool(ServerState.READY))
    during = facts(slot, in_pool(ServerState.STALE), is_publishing=True)
    after = facts(slot, in_pool(ServerState.STALE))
    assert [before.state, during.state, after.state] == [ServerState.READY, ServerState.READY, ServerState.STALE]


async def test_why_the_trainer_doubts_its_weights_is_known_while_it_is_stale():
    why = "POST http://server-0/update_weights_from_disk: the connection broke off"
    slot, _, _ = handle()
    await slot.start(0, WEIGHTS, {})
    stale, ready = (
        facts(slot, replace(in_pool(state), reason=why)) for state in (ServerState.STALE, ServerState.READY)
    )
    assert (stale.stale_reason, ready.stale_reason) == (why, "")


async def test_a_verdict_of_the_monitor_counts_for_one_that_lives():
    slot, _, _ = handle()
    await slot.start(0, WEIGHTS, {})
    hung = Verdict(health=Health.DEAD, reason="two of three", cause=Cause.SERVER_HANG)
    assert facts(slot, in_pool(ServerState.READY), hung).verdict.cause is Cause.SERVER_HANG


@pytest.mark.parametrize(
    ("pool", "silent_s", "judged", "state"),
    [
        (ServerState.SUSPECT, HUNG_AFTER_S, SILENT, ServerState.DEAD),
        (ServerState.SUSPECT, HUNG_AFTER_S - 1, SILENT, ServerState.SUSPECT),
        (ServerState.READY, HUNG_AFTER_S, SILENT, ServerState.READY),
        (ServerState.SUSPECT, HUNG_AFTER_S, None, ServerState.SUSPECT),
    ],
)
async def test_an_actor_that_answers_nobody_is_a_reason_only_where_requests_to_its_server_fail(
    pool, silent_s, judged, state
):
    """P7: alone it says nothing of the server; without a HealthMonitor nobody knows whether it answers."""
    slot, actor, _ = handle()
    await slot.start(0, WEIGHTS, {})
    actor.silent_s = silent_s
    actor.tell(slot)
    assert facts(slot, in_pool(pool), judged).state is state


@pytest.mark.parametrize(("was_told", "deaths"), [(False, 1), (True, 0)])
async def test_a_death_that_its_host_notices_after_the_order_to_restart_it_is_told(was_told, deaths):
    slot, actor, died = handle()
    await slot.start(0, WEIGHTS, {})
    actor.end("ended by SIGKILL", was_told=was_told)
    await slot.stop()
    assert len(died) == deaths
    await slot.start(1, WEIGHTS, {})
    assert (slot.recovered_after_s() is not None) is (deaths == 1)


async def test_an_end_that_nobody_saw_and_that_came_after_the_order_was_the_order():
    slot, actor, died = handle()
    await slot.start(0, WEIGHTS, {})
    stop = actor.stop.remote

    async def stop_unseen():
        actor.end("its host was killed", exit_code=None)
        return await stop()

    actor.stop.remote = stop_unseen
    await slot.stop()
    assert died == []


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
    slot, actor, _ = handle()
    actor.generation = generation
    actor.state = ServerState.READY
    await slot.adopt(ordered, 1)
    verdict = slot.facts(None, None, is_publishing=False).verdict
    assert (verdict.health, verdict.cause, verdict.reason) == (Health.DEAD, Cause.SERVER_CRASH, said)


@pytest.mark.parametrize(("was_told", "deaths"), [(True, [1]), (False, [0, 1])])
async def test_an_end_that_an_earlier_coordinator_ordered_is_no_death_and_the_next_one_is_watched(was_told, deaths):
    """Killed while it had the server replaced: its successor told the ordered end as a death, and asked no more."""
    slot, actor, died = handle()
    actor.generation = 0
    actor.state = ServerState.READY
    actor.end("told to stop", was_told=was_told)
    await slot.adopt(1, 1)
    actor.tell(slot)
    actor.generation = 1
    actor.state = ServerState.READY
    actor.exit = None
    actor.tell(slot)
    assert facts(slot).state is ServerState.STALE
    actor.end("ended by SIGSEGV", exit_code=-11)
    actor.tell(slot)
    assert facts(slot).state is ServerState.DEAD
    assert [end.generation for end in died] == deaths


async def test_an_adopted_server_is_known_before_the_first_plan_and_a_silent_actor_keeps_nobody_waiting(monkeypatch):
    slot, actor, _ = handle()
    actor.generation = 2
    actor.state = ServerState.READY
    actor.version = 3
    await slot.adopt(2, 1)
    assert facts(slot, in_pool(ServerState.READY, generation=2)).state is ServerState.READY
    monkeypatch.setattr(server_handle, "ANSWER_S", 0.01)
    actor.report.remote = lambda work: never()
    await slot.adopt(2, 1)
    assert facts(slot).verdict.health is Health.UNKNOWN


async def test_of_a_silent_actor_that_a_new_monitor_knows_nothing_else_of_it_is_known_that_it_is_silent():
    slot, actor, _ = handle()
    actor.generation = 0
    actor.state = ServerState.READY
    await slot.adopt(0, 1)
    slot.take_report(ServerReport(ordered=0, info=None, verdict=SILENT, silent_s=HUNG_AFTER_S))
    seen = facts(slot, in_pool(ServerState.SUSPECT), SILENT)
    assert (seen.state, seen.verdict.cause) == (ServerState.DEAD, Cause.SERVER_HANG)
