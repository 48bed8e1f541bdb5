"""How fast servers are, from the requests that they answered."""

import pytest

from actors.rollout.throughput_tracker import LATELY, USUAL_AT_LEAST, ThroughputTracker
from launcher.config.supervision import HealthConfig


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


def test_nothing_is_said_before_there_is_a_past():
    clients = Clients()
    clients.rounds(USUAL_AT_LEAST + LATELY - 1)
    assert clients.book.paces() == {}


def test_requests_that_share_a_second_share_it_and_idle_time_is_none():
    clients = Clients()
    clients.rounds(USUAL_AT_LEAST + LATELY)
    assert clients.book.paces()["server-0"].usual == pytest.approx(1000)


def test_a_server_four_times_slower_than_it_was_is_slow():
    clients = Clients()
    clients.rounds(20)
    assert clients.verdict() is None
    clients.rounds(LATELY, tokens=250)
    assert clients.verdict() == "248 tokens/s, usually 1000"


def test_fewer_requests_at_once_are_no_slowness_and_as_few_as_before_are():
    """As agents have them: many side by side, then one after another."""
    clients = Clients()
    clients.rounds(20, together=8, tokens=800)
    for _ in range(20):
        clients.rounds(1, together=1, tokens=60)
        assert clients.verdict() is None
    clients.rounds(LATELY, together=1, tokens=10)
    assert clients.verdict() == "10 tokens/s, usually 60"


def test_where_all_are_slower_it_is_the_machine():
    clients = Clients()
    for name in ("server-0", "server-1"):
        clients.rounds(20, name=name)
    for name in ("server-0", "server-1"):
        clients.rounds(LATELY, name=name, tokens=250)
    assert clients.verdict() is None


def test_another_life_begins_with_no_past():
    clients = Clients()
    clients.rounds(20)
    clients.book.forget("server-0")
    assert clients.book.paces() == {}


def test_tokens_are_counted_by_busy_seconds():
    clients = Clients()
    for _ in range(USUAL_AT_LEAST + LATELY):
        clients.book.begins("server-0", clients.now)
        clients.now += 4.0
        clients.book.made("server-0", 1000)
        clients.book.ends("server-0", clients.now)
    pace = clients.book.paces()["server-0"]
    assert (pace.lately, pace.usual) == (250.0, 250.0)


def test_a_busy_period_begins_with_its_first_request_and_ends_with_its_last():
    """Two that overlap by half: three busy seconds, not four."""
    clients = Clients()
    for _ in range(USUAL_AT_LEAST + LATELY):
        start = clients.now
        clients.book.begins("server-0", start)
        clients.book.begins("server-0", start + 1.0)
        clients.book.made("server-0", 300)
        clients.book.ends("server-0", start + 2.0)
        clients.book.made("server-0", 150)
        clients.book.ends("server-0", start + 3.0)
        clients.now = start + 10.0
    windows = clients.book._servers["server-0"].windows
    assert {window.tokens_per_s for window in windows} == {150.0}
    assert len(windows) == 2 * (USUAL_AT_LEAST + LATELY)


def test_an_end_that_nobody_began_counts_for_nothing():
    clients = Clients()
    clients.book.ends("server-0", 5.0)
    clients.book.made("server-0", 10)
    assert clients.book.paces() == {}
    clients.book.begins("server-0", 10.0)
    clients.book.ends("server-0", 10.5)
    clients.book.ends("server-0", 99.0)
    assert clients.book._servers["server-0"].busy_s == 0.5


def test_usual_is_what_was_before_the_last_few():
    clients = Clients()
    clients.rounds(USUAL_AT_LEAST, tokens=1000)
    clients.rounds(LATELY, tokens=400)
    pace = clients.book.paces()["server-0"]
    assert (pace.lately, pace.usual) == (400.0, 1000.0)
