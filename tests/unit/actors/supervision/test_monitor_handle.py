"""A HealthMonitor that hangs is replaced; one that restarts, or a Coordinator that paused, costs no process."""

import asyncio
import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError

from actors.cluster import actor_calls
from actors.monitoring.health_monitor import MonitorReport
from actors.serving.server_report import ServerReport, ServerWork
from actors.supervision import monitor_handle, server_handle
from actors.supervision.monitor_handle import MonitorHandle
from actors.supervision.server_handle import ServerLoads
from launcher.base.messages import Cause, Health, Incident, ServerInfo, ServerState, Verdict
from tests.support.fake_actors import FakeActor, never
from tests.support.machine import all_turns

WAITS = ServerInfo(name="server-0", index=0, generation=1, state=ServerState.STALE, url="u", weight_version=6)
WORKS = ServerReport(ordered=1, info=WAITS, verdict=Verdict(health=Health.HEALTHY, reason="tokens"))
SOUND = MonitorReport(servers={"server-0": WORKS})
INCIDENT = Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason="fell", since=1.0, onset_step=3)
WORK = ServerWork(generation=1)
TURNS = 200
ANSWER_S, LOOKS = 0.002, 15
HUNG_S = LOOKS * ANSWER_S


@pytest.fixture
def ended(monkeypatch):
    """The actors that were ended; nobody waits for real."""
    ended = []
    monkeypatch.setattr(monitor_handle, "ANSWER_S", ANSWER_S)
    monkeypatch.setattr(monitor_handle, "HOLD_S", 0.0)
    monkeypatch.setattr(monitor_handle, "LOOK_S", 0.0)
    monkeypatch.setattr(monitor_handle.ray, "kill", lambda actor, no_restart: ended.append(no_restart))
    return ended


def look(watch, until, **links):
    """A link to a monitor whose `watch` is given, until `until(link)` holds or for many turns."""

    async def inside():
        link = MonitorHandle(
            FakeActor(watch=watch), work=dict, changed=asyncio.Event(), **{"hung_after_s": HUNG_S} | links
        )
        link.begin_looking()
        for _ in range(TURNS):
            if until(link):
                break
            await asyncio.sleep(0.003)
        await link.close()
        return link

    return asyncio.run(inside())


def test_one_that_answers_nobody_is_ended_once_so_that_ray_starts_another(ended):
    """A stopped process is alive to Ray: the trainer would wait at the gate, and the run hang."""
    told, answers = [], [SOUND]

    def watch(servers, hold_s):
        return answers.pop() if answers else never()

    look(watch, lambda link: ended, hung=lambda: told.append("hung"))
    assert (ended, told) == ([False], ["hung"])


def test_one_that_is_being_restarted_is_left_alone(ended):
    asked = []

    def watch(servers, hold_s):
        asked.append(1)
        if len(asked) == 1:
            return SOUND
        raise ActorUnavailableError("restarting", None)

    look(watch, lambda link: len(asked) > 4 * LOOKS)
    assert len(asked) > 4 * LOOKS
    assert ended == []


def test_one_that_was_late_now_and_then_is_left_alone(ended):
    asked = []

    def watch(servers, hold_s):
        asked.append(1)
        return SOUND if len(asked) % 5 == 0 else never()

    look(watch, lambda link: len(asked) > 4 * LOOKS)
    assert len(asked) > 4 * LOOKS
    assert ended == []


def test_without_the_count_it_would_be_waited_for_for_ever(ended):
    answers = [SOUND]
    look(lambda *_: answers.pop() if answers else never(), lambda link: ended, hung_after_s=1e9)
    assert ended == []


async def test_its_word_grows_old(monkeypatch):
    """P7: of a monitor that is away nothing is known, and nothing is done on what it said last."""
    now = 100.0
    monkeypatch.setattr(monitor_handle.time, "monotonic", lambda: now)
    view = dataclasses.replace(SOUND, incident=INCIDENT, incident_age_s=4.0)
    link = MonitorHandle(
        FakeActor(watch=lambda *_: view),
        work=dict,
        changed=asyncio.Event(),
        hung_after_s=HUNG_S,
    )
    await link._probe.refresh()
    unasked = MonitorHandle(link._actor, work=dict, changed=asyncio.Event(), hung_after_s=HUNG_S)
    assert (link.is_heard, unasked.is_heard) == (True, False)
    fresh = link.incident, link.verdict("server-0", 1), link.verdict("server-0", 2)
    monkeypatch.setattr(monitor_handle, "FRESH_S", -1.0)
    incident, verdict = link.incident, link.verdict("server-0", 1)
    assert fresh == (dataclasses.replace(INCIDENT, since=now - 4.0), WORKS.verdict, None)
    assert (incident, verdict, link.is_heard) == (None, None, False)


async def test_a_defect_in_telling_it_the_servers_is_not_kept_from_the_coordinator(ended):
    link = MonitorHandle(FakeActor(watch=SOUND), work=lambda: {}["a defect"], changed=asyncio.Event(), hung_after_s=1.0)
    link.begin_looking()
    with pytest.raises(KeyError, match="a defect"):  # at one of its next looks
        for _ in range(TURNS):
            assert link.incident is None
            await asyncio.sleep(0)


def test_silence_is_counted_while_it_is_asked_in_vain_and_forgotten_with_an_answer(ended):
    silences = []

    def watch(servers, hold_s):
        if len(silences) < 5:
            raise ActorUnavailableError("dies each time it is started", None)
        return SOUND

    def until(link):
        silences.append(link.silent_s)
        return len(silences) > 20 and link.silent_s == 0.0

    link = look(watch, until)
    assert max(silences) > 0.0
    assert link.silent_s == 0.0


def test_a_pause_of_the_asker_is_none_of_the_monitors(ended, monkeypatch):
    """A Coordinator that was stopped for an hour must not end the run for the hour."""
    hours = iter(range(0, 10_000_000, 3600))
    monkeypatch.setattr(monitor_handle, "Silence", partial(actor_calls.Silence, lambda: float(next(hours))))

    asked, turns = [], []

    def watch(servers, hold_s):
        asked.append(1)
        raise ActorUnavailableError("being restarted", None)

    link = look(watch, lambda link: turns.append(1) or len(turns) > 5)
    assert 0.0 < link.silent_s <= len(asked) * actor_calls.LONGEST_TURN_S


async def test_it_is_released_from_the_servers_that_are_about_to_be_stopped(ended):
    """Else it would report each as dead."""
    watched = []
    actor = FakeActor(watch=lambda servers, hold_s: watched.append(servers) or SOUND)
    link = MonitorHandle(actor, work=lambda: {"server-0": WORK}, changed=asyncio.Event(), hung_after_s=HUNG_S)
    link.begin_looking()
    while not watched:
        await asyncio.sleep(0)
    await link.release()
    seen = len(watched)
    await all_turns()  # nobody waits between two questions here
    assert len(watched) == seen
    assert watched[0] == {"server-0": WORK}
    assert watched[-1] == {}


async def test_each_servers_report_is_given_to_its_handle(ended):
    heard = []
    link = MonitorHandle(
        FakeActor(watch=SOUND),
        work=dict,
        heard=lambda name, report: heard.append((name, report)),
        changed=asyncio.Event(),
        hung_after_s=HUNG_S,
    )
    await link._probe.refresh()
    assert heard == [("server-0", WORKS)]


class Loads:
    """One server, as the trainer sees it at a time."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(server_handle.time, "monotonic", lambda: self.now)
        self.slot = SimpleNamespace(name="server-0", generation=1, is_running=True, serves=True, info=WAITS)
        self.loads = ServerLoads({"server-0": self.slot}, limit_s=60.0)

    def loading_s(self, after_s=0.0, known=WAITS, *, phase="rollout", loading=()):
        self.now += after_s
        view = SimpleNamespace(servers=(known,), loading=loading, phase=phase, policy_version=7, in_flight={})
        return self.loads.work(view)["server-0"].loading_s


@pytest.fixture
def loads(monkeypatch):
    return Loads(monkeypatch)


def test_a_server_that_waits_for_weights_which_nobody_sends_is_at_no_task(loads):
    """While the trainer started, or a disk was full, it was found hung after actor.weight_update_timeout."""
    assert loads.loading_s() is None
    assert loads.loading_s(3600.0) is None
    assert loads.loading_s(loading=("server-0",)) == 0.0
    assert loads.loading_s(5.0) is None, "it was refused at once: nobody sends it anything now"


def test_one_that_is_sent_weights_has_its_time_and_is_stuck_after_it(loads):
    assert loads.loading_s(loading=("server-0",)) == 0.0
    assert loads.loading_s(59.5) == 59.5, "the load was given up after all its time"
    assert loads.loading_s(1.0) == 60.5 > 60.0
    with loads.loads.loads("server-0"):
        assert loads.loading_s() == 0.0, "sent again by order: its time begins anew"
    current = dataclasses.replace(WAITS, state=ServerState.READY, weight_version=7)
    assert loads.loading_s(known=current) is None
    assert loads.loading_s(known=dataclasses.replace(current, weight_version=6), phase="publish") is not None


def test_only_a_server_whose_start_has_ended_is_asked_and_one_that_does_not_serve_has_no_requests(loads):
    view = SimpleNamespace(servers=(), loading=(), phase="rollout", policy_version=7, in_flight={"server-0": 8})
    assert loads.loads.work(view) == {"server-0": ServerWork(generation=1, waiting=8, loading_limit_s=60.0)}
    loads.slot.serves = False
    assert loads.loads.work(view) == {"server-0": ServerWork(generation=1, loading_limit_s=60.0)}
    loads.slot.is_running = False
    assert loads.loads.work(view) == {}
