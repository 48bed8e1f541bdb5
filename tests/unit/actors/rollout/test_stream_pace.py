"""Silences of simulated servers: found soon, whatever their pace; and what is slow, paused or all alike is none."""

import random

import pytest

from actors.rollout import request_loop
from actors.rollout.request_loop import TICK_S, StreamPace
from launcher.base.messages import ServerInfo, ServerState
from launcher.config.schema import RolloutConfig
from launcher.policy.routing import StreamLook, silent_servers

SETTINGS = RolloutConfig()
AT = 30.0
SEEDS = range(200)


class Clients:
    """Some servers with requests, each of which gets tokens every so many seconds, as time goes by in ticks.

    `pace_s` at a moment: how long tokens take there, infinity for never. `is_away`: the trainer's loop stands still.
    """

    def __init__(self, seed, pace_s, *, is_away=lambda t: False, requests=6, chunks=8, busy=lambda name, t: True):
        self.draw = random.Random(seed)
        self.now = 0.0
        self.pace = StreamPace(lambda: self.now)
        self.pace_s = pace_s
        self.is_away = is_away
        self.busy = busy
        self.chunks = chunks
        self.live = {server(i): [] for i in range(2)}
        self.requests = requests

    def watch(self, until):
        """The silent servers at each tick."""
        found = []
        while self.now < until:
            self.now += TICK_S
            if self.is_away(self.now):
                continue
            for one, requests in self.live.items():
                while self.busy(one.name, self.now) and len(requests) < self.requests:
                    requests.append([self.pace.begins(one), 3 * self.draw.random(), self.chunks])
                for request in list(requests):
                    request[1] += TICK_S / self.pace_s(one.name, self.now)
                    if request[1] >= 1:
                        self.pace.heard(request[0])
                        request[1], request[2] = request[1] % 1, request[2] - 1
                    if request[2] == 0:
                        self.pace.ends(one, request[0])
                        requests.remove(request)
            self.pace.tick()
            found.append((self.now, {name for name, _ in silent_servers(self.pace.looks(), SETTINGS)}))
        return found


def server(index):
    return ServerInfo(name=f"server-{index}", index=index, generation=0, state=ServerState.READY)


def suspects(found):
    return [(t, names) for t, names in found if names]


def test_of_two_hundred_hangs_each_is_found_within_two_seconds_and_none_before():
    delays_s = []
    for seed in SEEDS:
        pace_s = random.Random(seed).uniform(0.02, 0.5)
        clients = Clients(seed, lambda name, t, pace_s=pace_s: 1e9 if name == "server-0" and t >= AT else pace_s)
        first, names = suspects(clients.watch(AT + 3))[0]
        assert names == {"server-0"}
        delays_s.append(first - AT)
        assert first - AT >= SETTINGS.hedge_after_s - pace_s - 2 * TICK_S
    assert max(delays_s) <= 2.0


TRAPS = {
    "ten times longer generation": {"chunks": 80},
    "a stall of the reward function: nobody asks": {"busy": lambda name, t: not AT <= t < AT + 5},
    "a pause of the trainer's own loop": {"is_away": lambda t: AT <= t < AT + 8},
    "a suspended machine: all stand still": {"pace_s": lambda name, t: 1e9 if AT <= t < AT + 8 else 0.2},
    "a pause shorter than is usual to wait for": {
        "pace_s": lambda name, t: 1e9 if name == "server-0" and AT <= t < AT + 0.3 else 0.2
    },
    "a slow server from the beginning": {"pace_s": lambda name, t: 1.0 if name == "server-0" else 0.1},
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_makes_no_server_a_suspect(name):
    for seed in range(20):
        clients = Clients(seed, **{"pace_s": lambda name, t: 0.2, **TRAPS[name]})
        assert suspects(clients.watch(AT + 15)) == [], seed


def test_on_a_machine_that_becomes_six_times_slower_hardly_any_is_suspected():
    """Now and then one that has yet to learn the new pace, beside one that has."""
    clients = [Clients(seed, lambda name, t: 0.2 * (6 if t >= AT else 1)) for seed in range(20)]
    found = [names for one in clients for _, names in one.watch(AT + 15)]
    assert sum(map(bool, found)) <= 0.01 * len(found)


def test_of_a_server_that_becomes_four_times_slower_the_pace_is_learned():
    clients = Clients(1, lambda name, t: 1.6 if name == "server-0" and t >= AT else 0.4)
    found = clients.watch(AT + 120)
    assert suspects([one for one in found if one[0] > AT + 60]) == []


def test_a_new_incarnation_has_no_past():
    clients = Clients(1, lambda name, t: 0.1)
    clients.watch(AT)
    again = ServerInfo(name="server-0", index=0, generation=1, state=ServerState.READY)
    clients.pace.begins(again)
    assert clients.pace.looks()["server-0", 1].usual_s is None


def test_of_a_new_server_that_has_answered_nothing_yet_the_pace_is_that_of_what_it_answers():
    """Its first requests are long: it hangs before one of them has ended."""
    for seed in SEEDS:
        clients = Clients(seed, lambda name, t: 1e9 if name == "server-0" and t >= AT else 0.2, chunks=10**9)
        found = suspects(clients.watch(AT + 3))
        assert found
        assert found[0][1] == {"server-0"}
        assert found[0][0] >= AT


def test_one_request_of_a_new_server_shows_no_pace():
    clients = Clients(1, lambda name, t: 0.1, chunks=10**9, requests=2)
    clients.watch(AT)
    assert {one.usual_s for one in clients.pace.looks().values()} == {None}


def test_did_a_late_tick_count_in_full_a_pause_of_the_trainer_would_make_suspects(monkeypatch):
    monkeypatch.setattr(request_loop, "LONGEST_TICK_S", 1e9)
    with_idle_peer = {"busy": lambda name, t: name == "server-0" or t < AT - 5, "is_away": TRAPS[PAUSE]["is_away"]}
    assert suspects(Clients(1, lambda name, t: 0.2, **with_idle_peer).watch(AT + 10))


class ByHand:
    """A pace whose requests wait for their tokens as many ticks as they are told."""

    def __init__(self):
        self.now = 0.0
        self.server = server(0)
        self.pace = StreamPace(lambda: self.now)

    def wait(self, ticks):
        for _ in range(ticks):
            self.now += TICK_S
            self.pace.tick()

    def begun(self, *waits):
        stream = self.pace.begins(self.server)
        for ticks in waits:
            self.wait(ticks)
            self.pace.heard(stream)
        return stream

    def ended(self, *waits):
        self.pace.ends(self.server, self.begun(*waits))

    def look(self):
        return self.pace.looks()["server-0", 0]


def test_what_is_usual_is_the_median_of_the_longest_waits_of_three_requests():
    by_hand = ByHand()
    by_hand.wait(1)
    by_hand.ended(1, 2, 1)
    by_hand.ended(2, 4, 1)
    stream = by_hand.begun(1)
    assert by_hand.look().usual_s is None
    by_hand.pace.ends(by_hand.server, stream)
    by_hand.ended(3, 6, 1)
    by_hand.begun(1, 5)
    assert by_hand.look().usual_s == pytest.approx(4 * TICK_S), "what is answered now is not counted beside them"


def test_before_its_first_tokens_a_request_waits_as_long_as_others_did():
    by_hand = ByHand()
    by_hand.wait(1)
    for first, other in ((1, 9), (2, 9), (3, 9)):
        by_hand.ended(first, other)
    by_hand.pace.begins(by_hand.server)
    assert by_hand.look().usual_s == pytest.approx(2 * TICK_S)


def test_lately_is_the_longest_wait_of_any_request():
    by_hand = ByHand()
    by_hand.wait(1)
    by_hand.begun(1, 4)
    by_hand.begun(1)
    assert by_hand.look().lately_s == pytest.approx(4 * TICK_S)
    assert by_hand.look().silent_s == 0
    by_hand.wait(6)
    assert by_hand.look().lately_s == pytest.approx(7 * TICK_S)
    assert by_hand.look().silent_s == pytest.approx(6 * TICK_S)


PAUSE = "a pause of the trainer's own loop"


# ── the rule ──


def look(silent, *, usual, lately=None):
    return StreamLook(silent_s=silent, lately_s=silent if lately is None else lately, usual_s=usual)


@pytest.mark.parametrize(
    ("looks", "silent"),
    [
        ({"a": look(0.5, usual=0.1)}, {"a"}),
        ({"a": look(0.49, usual=0.1)}, set()),
        ({"a": look(1.49, usual=0.5)}, set()),
        ({"a": look(1.5, usual=0.5), "b": look(1.5, usual=None)}, set()),
        ({"a": look(1.5, usual=0.5)}, {"a"}),
        ({"a": look(99.0, usual=None)}, set()),
        ({"a": look(1.5, usual=0.5), "b": look(0.1, lately=0.5, usual=0.5)}, {"a"}),
        ({"a": look(1.5, usual=0.5), "b": look(0.1, lately=0.6, usual=0.5)}, set()),
        ({"a": look(1.8, usual=0.5), "b": look(0.1, lately=0.6, usual=0.5)}, {"a"}),
        ({"a": look(9.0, usual=0.5), "b": look(9.0, usual=0.5)}, set()),
        ({"a": look(9.0, usual=0.5), "b": look(9.0, usual=None)}, set()),
        ({"a": look(9.0, usual=0.1), "b": look(9.0, usual=5.0)}, set()),
        ({"a": look(9.0, usual=0.5), "b": look(1.0, usual=None)}, {"a"}),
        ({"a": look(9.0, usual=0.5), "b": look(9.0, usual=0.5), "c": look(0.1, usual=0.5)}, set()),
        ({"a": look(9.0, usual=0.5), "b": look(0.1, usual=0.5), "c": look(0.1, usual=0.5)}, {"a"}),
        ({}, set()),
    ],
)
def test_each_bound_of_a_silence(looks, silent):
    assert set(silent_servers(looks, SETTINGS)) == silent


def test_the_reason_says_both_waits_and_null_switches_it_off():
    looks = {"a": look(1.04, usual=0.1)}
    assert silent_servers(looks, SETTINGS) == {"a": "no tokens for 1.0 s, usually within 0.1 s"}
    assert "usually within 0.01 s" in silent_servers({"a": look(1.04, usual=0.0)}, SETTINGS)["a"]
    assert silent_servers(looks, RolloutConfig(hedge_after_s=None)) == {}
