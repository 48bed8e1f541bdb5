"""Who is cut off or replaced ends itself; who was only suspended asks first, and does nothing until it is answered."""

import os
import threading

import pytest

from actors.cluster import fencing as lease_module
from actors.cluster.fencing import CurrentIncarnation, Lease

ME = ("node-1", os.getpid())


class World:
    def __init__(self, answer: bool | None = True) -> None:
        self.now = 0.0
        self.answer = answer
        self.ended = 0
        self.lease = Lease(5.0, self.ask, self.end, clock=lambda: self.now)

    def ask(self):
        return self.answer

    def end(self):
        self.ended += 1

    def second(self) -> None:
        self.now += 1.0
        self.lease.count()
        self.lease.renew()


def test_one_that_is_confirmed_goes_on_for_ever():
    world = World()
    for _ in range(100):
        world.second()
    assert world.lease.is_held()
    assert not world.ended


def test_one_that_is_cut_off_ends_after_its_time_and_not_before():
    world = World()
    world.second()
    world.answer = None
    for _ in range(5):
        world.second()
    assert (world.ended, world.lease.is_held()) == (0, True)
    world.second()
    assert (world.ended, world.lease.is_held()) == (1, False)


def test_one_that_is_replaced_ends_at_once():
    world = World(answer=False)
    world.second()
    assert world.ended == 1


def test_one_that_was_suspended_holds_nothing_until_it_has_asked_again():
    world = World()
    world.second()
    world.now += 3600.0
    assert not world.lease.is_held()
    world.lease.count()
    assert not world.ended
    world.lease.renew()
    assert world.lease.is_held()


def test_an_answer_that_was_under_way_while_it_was_suspended_renews_nothing():
    world = World()

    def slow():
        world.now += 3600.0
        return True

    world.lease = Lease(5.0, slow, world.end, clock=lambda: world.now)
    world.lease.renew()
    assert not world.lease.is_held()


def table(state: str, node: str, pid: int) -> dict[str, object]:
    return {"State": state, "Pid": pid, "Address": {"NodeID": node}}


@pytest.mark.parametrize(
    ("before", "now", "is_it"),
    [
        (None, table("ALIVE", *ME), True),
        (None, table("PENDING_CREATION", *ME), None),
        (None, table("RESTARTING", "", 0), None),  # it is just being made anew
        (table("ALIVE", *ME), table("RESTARTING", "", 0), False),
        (table("ALIVE", *ME), table("ALIVE", "node-2", ME[1]), False),  # the same pid, on another node
        (table("ALIVE", *ME), table("ALIVE", "node-1", 1), False),
        (table("ALIVE", *ME), table("DEAD", *ME), False),
        (table("ALIVE", *ME), {}, None),
    ],
)
def test_what_the_store_says_of_a_life(before, now, is_it):
    answers = [one for one in (before, now) if one is not None]
    ask = CurrentIncarnation("actor", ME[0], lambda actor: answers.pop(0))
    for _ in range(len(answers)):
        said = ask()
    assert said is is_it


def test_a_store_that_fails_says_nothing():
    def away(actor):
        raise ConnectionError

    assert CurrentIncarnation("actor", ME[0], away)() is None


def test_what_must_not_be_done_twice_waits_until_the_lease_is_held_again(monkeypatch):
    world = World()
    monkeypatch.setattr(lease_module, "_mine", [world.lease])
    world.now += 3600.0
    waiting = threading.Thread(target=lease_module.wait_for_lease)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    world.lease.renew()
    waiting.join(30)
    assert not waiting.is_alive()


def test_who_needs_no_lease_waits_for_none(monkeypatch):
    monkeypatch.setattr(lease_module, "_mine", [])
    lease_module.wait_for_lease()
    assert lease_module.holds_lease()
