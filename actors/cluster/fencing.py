"""Fencing: an actor may act only while the cluster confirms that its process is the current incarnation.

    each second: which process is this actor?  ─► this one          the lease is renewed
    (the cluster's store)                      ─► another, or none  this process ends at once
                                               ─► no answer         after `seconds` this process ends itself

A node that is cut off is declared lost and its actors are started elsewhere, while the old ones still run behind the
partition. Whoever gives orders to the new incarnation waits `seconds` and a margin first; by then the old one has
ended. A process that was suspended meanwhile wakes with an old lease: `holds_lease` is False until it is renewed.

Only actors on a cluster that the run did not start itself hold a lease: on one machine nothing can be cut off. Every
actor also ends with its raylet.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray._private.state as ray_state

from launcher.config.schema import RunConfig

ASK_EVERY_S = 1.0
HELD_UP_S = 0.05
LEASE_LOST = 8
"""Exit code of an actor that was cut off, or replaced."""
MARGIN_S = 3.0
"""Beyond the lease, before the next incarnation acts: the time that the old process takes to end itself."""
RAYLET_GONE = 7
"""Exit code of a worker that ended because its raylet had."""
ALIVE, DEAD = "ALIVE", "DEAD"

log = logging.getLogger("lease")

Ask = Callable[[], bool | None]
"""True: this process is the actor's current incarnation; False: it is not; None: unknown."""


class Lease:
    """`ask` runs on a separate thread and may wait for ever. Another thread counts turns, not seconds, so a process
    that was suspended can ask before it ends itself."""

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
        """By the clock: a lease that is too old permits nothing."""
        return self._clock() - self._renewed_at <= self.seconds

    def begin(self) -> None:
        threading.Thread(target=self._go_on_asking, name="lease", daemon=True).start()
        threading.Thread(target=self._go_on_counting, name="lease-end", daemon=True).start()

    def renew(self) -> None:
        """Ask once. The lease counts from before the question, as the answer may have waited for long."""
        asked_at = self._clock()
        match self._ask():
            case True:
                self._renewed_at = asked_at
                self._turns = 0
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


def bind_to_cluster(config: RunConfig) -> None:
    """From now on this actor's process ends with its raylet, and when it is cut off from the cluster or replaced."""
    die_with_raylet()
    hold_lease(lease_of(config))


def lease_of(config: RunConfig) -> float | None:
    """How long an actor may act without an answer of the cluster. None on a cluster that the run started itself."""
    return None if config.cluster.address == "local" else config.cluster.lease_s


def raylet_pid() -> int | None:
    """None outside a Ray worker."""
    pid = os.environ.get("RAY_RAYLET_PID")
    return int(pid) if pid else None


def die_with_raylet() -> None:
    """From now on this process ends when its raylet does, within 40 ms. Does nothing outside a Ray worker.

    Ray's own check in a worker is `kill(pid, 0)`, which succeeds for a zombie: where the raylet's parent doesn't
    collect it (a driver that called `ray.init()`, a container without an init), actors would outlive their node.
    """
    pid = raylet_pid()
    if pid is None:
        return
    descriptor = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)

    def wait() -> None:
        poll.poll()
        os._exit(RAYLET_GONE)

    threading.Thread(target=wait, name="die-with-raylet", daemon=True).start()


def hold_lease(seconds: float | None) -> None:
    """From now on this actor's process ends when it is cut off or replaced. None: no lease is needed."""
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
    """Call before writing what must not be written twice: returns when the lease is held, else this process ends.

    A process that was suspended for longer than its lease waits here until it knows whether it was replaced.
    """
    while not holds_lease():
        time.sleep(HELD_UP_S)


class CurrentIncarnation:
    """Asks the cluster's store whether this process is the actor's current incarnation."""

    def __init__(self, actor: str, node: str, known: Callable[[str], Mapping[str, Any]] = ray_state.actors) -> None:
        self._actor = actor
        self._me = (node, os.getpid())
        self._known = known
        self._was_confirmed = False

    def __call__(self) -> bool | None:
        """While the actor is RESTARTING, only a process that was confirmed before has been replaced."""
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
