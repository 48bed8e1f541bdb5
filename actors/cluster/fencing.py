"""An actor's right to act on a cluster: it lasts only while the cluster confirms that this process is its present life.

    each second: the cluster's store, who is this actor?  ─► this process     the lease is renewed
                                                          ─► another, or none  this process ends at once
                                                          ─► no answer         after `seconds` this process ends itself

A node that is cut off is declared lost, and its actors are started elsewhere, while the old ones still run behind the
partition (RAY.md, section 5). Whoever orders such a new life to do anything waits `seconds` and a margin first, by when
the old one is gone. A process that was suspended meanwhile wakes to an old lease: `holds_lease` is False until it has
been renewed, so what must not be done twice is not done before its end is noticed.

Only actors hold one, and only on a cluster that the run did not start itself: on one machine nothing can be cut off.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray._private.state as ray_state

ASK_EVERY_S = 1.0
HELD_UP_S = 0.05
LEASE_LOST = 8
"""Exit code of an actor that was cut off, or replaced."""
MARGIN_S = 3.0
"""Beyond the lease, for whoever starts the next life: the turns of the process that ends itself."""
ALIVE, DEAD = "ALIVE", "DEAD"

log = logging.getLogger("lease")

Ask = Callable[[], bool | None]
"""True: this process is the actor's present life; False: it is not; None: nobody knows."""


class Lease:
    """`ask` is called from a thread of its own, and may wait for ever. Time is counted in turns of another thread, so
    that a process that was suspended gets the chance to ask before it ends itself."""

    def __init__(
        self, seconds: float, ask: Ask, end: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = seconds
        self._ask = ask
        self._end = end
        self._clock = clock
        self._renewed_at = clock()
        self._turns = 0

    def is_held(self) -> bool:
        """By the clock: nothing may be done with a lease that nobody has renewed for so long."""
        return self._clock() - self._renewed_at <= self.seconds

    def begin(self) -> None:
        threading.Thread(target=self._go_on_asking, name="lease", daemon=True).start()
        threading.Thread(target=self._go_on_counting, name="lease-end", daemon=True).start()

    def renew(self) -> None:
        """Ask once. The lease counts from before the question: its answer may have waited as long as this process."""
        asked_at = self._clock()
        match self._ask():
            case True:
                self._renewed_at, self._turns = asked_at, 0
            case False:
                self._end()

    def count(self) -> None:
        """One turn of ASK_EVERY_S without an answer."""
        self._turns += 1
        if self._turns * ASK_EVERY_S > self.seconds:
            self._end()

    def _go_on_asking(self) -> None:
        while True:
            self.renew()
            time.sleep(ASK_EVERY_S)

    def _go_on_counting(self) -> None:
        while True:
            time.sleep(ASK_EVERY_S)
            self.count()


_mine: list[Lease] = []


def hold_lease(seconds: float | None) -> None:
    """From now on this actor's process ends when it is cut off or replaced. None: it needs no lease."""
    if seconds is None or _mine:
        return
    context = ray.get_runtime_context()
    actor, node = context.get_actor_id(), context.get_node_id()
    if actor is None:
        return
    _mine.append(Lease(seconds, CurrentIncarnation(actor, node), lambda: os._exit(LEASE_LOST)))
    _mine[0].begin()


def holds_lease() -> bool:
    """Whether this process may act; always, where it needs no lease."""
    return not _mine or _mine[0].is_held()


def wait_for_lease() -> None:
    """Before what must not be done twice is written down. Returns when the lease is held; else this process ends here.

    A process that was suspended for longer than its lease, between its last question and this line, is held up until
    it knows whether another has taken its place.
    """
    while not holds_lease():
        time.sleep(HELD_UP_S)


class CurrentIncarnation:
    """Asks the cluster's store whether this process is the actor's present life."""

    def __init__(self, actor: str, node: str, known: Callable[[str], Mapping[str, Any]] = ray_state.actors) -> None:
        self._actor = actor
        self._me = (node, os.getpid())
        self._known = known
        self._was_confirmed = False

    def __call__(self) -> bool | None:
        """A life is being made while it is RESTARTING, too: only one that was confirmed has then been replaced."""
        try:
            known = self._known(self._actor)
            state, holder = known["State"], (known["Address"]["NodeID"], known["Pid"])
        except Exception as error:  # noqa: BLE001 - Ray's own errors here are many, and bare; no answer is no renewal
            log.warning("lease.not_renewed reason=%r", error)
            return None
        if state == ALIVE and holder == self._me:
            self._was_confirmed = True
            return True
        return False if state in (ALIVE, DEAD) or self._was_confirmed else None
