"""How fast servers are, from the requests that they answered."""

import pytest

from actors.rollout.throughput_tracker import LATELY, ThroughputTracker
from launcher.config.supervision import HealthConfig
from launcher.policy.liveness import Pace


class Clients:
    """Each round, `together` requests at once of one second's length."""

    def __init__(self):
        self.book, self.now = ThroughputTracker(), 0.0

    def rounds(self, n, *, name="server-0", tokens=1000, together=4, idle_s=5.0):
        for _ in range(n):
            for _ in range(together):
                self.book.begins(name, self.now)
            self.now += 1.0
            for _ in range(together):
                self.book.made(name, tokens // together)
                self.book.ends(name, self.now)
            self.now += idle_s

    def verdict(self, name="server-0"):
        return self.book.slow(HealthConfig()).get(name)


def test_nothing_is_said_before_enough_was_seen_of_both():
    clients = Clients()
    clients.rounds(LATELY, name="server-1")
    clients.rounds(LATELY - 1, tokens=100)
    assert list(clients.book.paces()) == ["server-1"]
    assert clients.verdict() is None
    clients.rounds(1, tokens=100)
    assert clients.verdict() is not None


def test_requests_that_share_a_second_share_it_and_idle_time_is_none():
    clients = Clients()
    clients.rounds(3 * LATELY)
    assert clients.book.paces()["server-0"] == Pace(of_all=pytest.approx(1000), of_each=pytest.approx(250))


def test_a_server_four_times_slower_than_the_others_is_slow_until_it_is_not():
    clients = Clients()
    clients.rounds(LATELY)
    clients.rounds(LATELY, name="server-1")
    assert clients.verdict() is None
    clients.rounds(LATELY, tokens=248)
    assert clients.verdict() == "248 tokens/s, the others 1000"
    assert clients.verdict("server-1") is None
    clients.rounds(LATELY)
    assert clients.verdict() is None


def test_a_server_alone_is_never_slow_whatever_it_did_before():
    clients = Clients()
    clients.rounds(60)
    clients.rounds(LATELY, tokens=40)
    assert clients.verdict() is None


def test_fewer_requests_at_once_are_no_slowness_and_as_few_as_before_are():
    """As agents have them: many side by side, then one after another."""
    clients = Clients()
    clients.rounds(LATELY, name="server-1", together=8, tokens=800)
    clients.rounds(LATELY, together=1, tokens=60)
    assert clients.verdict() is None, "it makes less in all, since less is asked of it"
    clients.rounds(LATELY, together=1, tokens=10)
    assert clients.verdict() == "10 tokens/s, the others 800"
    clients.rounds(LATELY, together=32, tokens=640)
    assert clients.verdict() is None, "each waits longer, since so many are asked at once"


def test_where_all_are_slower_it_is_the_machine():
    clients = Clients()
    for tokens in (1000, 248):
        for name in ("server-0", "server-1"):
            clients.rounds(LATELY, name=name, tokens=tokens)
    assert clients.verdict() is None
    assert clients.verdict("server-1") is None


def test_another_life_begins_with_no_past():
    clients = Clients()
    clients.rounds(20)
    clients.book.forget("server-0")
    assert clients.book.paces() == {}


def test_a_busy_period_begins_with_its_first_request_and_ends_with_its_last():
    """Two that overlap by half: three busy seconds, not four."""
    clients = Clients()
    for _ in range(LATELY):
        start = clients.now
        clients.book.begins("server-0", start)
        clients.book.begins("server-0", start + 1.0)
        clients.book.made("server-0", 300)
        clients.book.ends("server-0", start + 2.0)
        clients.book.made("server-0", 150)
        clients.book.ends("server-0", start + 3.0)
        clients.now = start + 10.0
    windows = clients.book._servers["server-0"].windows
    assert [window.of_all for window in windows] == [150.0] * LATELY
    assert {window.of_each for window in windows} == {100.0, 150.0}


def test_an_end_that_nobody_began_counts_for_nothing():
    clients = Clients()
    clients.book.ends("server-0", 5.0)
    clients.book.made("server-0", 10)
    assert clients.book.paces() == {}
    clients.book.begins("server-0", 10.0)
    clients.book.ends("server-0", 10.5)
    clients.book.ends("server-0", 99.0)
    assert clients.book._servers["server-0"].busy_s == 0.5
    clients.book.begins("server-0", 100.0)
    clients.book.ends("server-0", 100.25)
    assert clients.book._servers["server-0"].busy_s == 0.75
