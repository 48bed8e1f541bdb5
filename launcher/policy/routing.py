"""Which of the servers that may answer gets a request: the least loaded, unless one has the prompt's prefix cached. And
when it moves to another one: where its server is silent. And how many prompts may be asked for (`may_take`).

Samples of one prompt travel in one request, so affinity matters for what comes after it: the samples still missing, a
prompt that was given back. Those find their prefix in the cache of the server that was asked before, as long as it is
the same incarnation at the same weights (new weights empty the cache); that one is *warm*. A server that had the
prompt in an earlier epoch has nothing of it in its cache: it is preferred among equals only.

A server that comes back begins with nothing in flight, so that it is given work until it has as much as the least
loaded of the others, and then no more than its turn: never ahead of them by more than one request.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from launcher.config.schema import RolloutConfig

Server = TypeVar("Server", bound=Hashable)

WARM_IS_WORTH = 1.0
"""So many requests of the same size may be in flight on the warm server beyond the least loaded one's, before the
prompt goes elsewhere: what a warm prefix saves is at most the prefill of one prompt, what a queue costs is decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCandidate:
    """One server that may answer. `samples` in flight there; `is_warm`, `is_home`: see the module.

    `is_avoided`: it has just failed at this very request.
    """

    name: str
    index: int
    samples: int
    is_warm: bool = False
    is_home: bool = False
    is_avoided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    name: str
    reason: str


def route(candidates: Sequence[RoutingCandidate], *, samples: int) -> Route | None:
    """Where a request of so many `samples` goes; None where nobody may answer."""
    if not candidates:
        return None
    willing = [one for one in candidates if not one.is_avoided] or list(candidates)
    least = min(willing, key=lambda one: (one.samples, not one.is_home, one.index))
    warm = [one for one in willing if one.is_warm and one.samples <= least.samples + WARM_IS_WORTH * samples]
    if warm:
        return Route(name=warm[0].name, reason="its cache holds the prefix")
    return Route(
        name=least.name, reason="it had the prompt before, and is as free" if least.is_home else "least loaded"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLook:
    """The requests of one server at one moment.

    `silent_s`: for how long none of them has got tokens; `lately_s`: the longest that one of them waited for its last
    tokens, or waits now. `usual_s`: the longest wait for tokens within a request, the median of the last ones; of that
    for the first tokens, where none of these has got any. None: not known yet.
    """

    silent_s: float
    lately_s: float
    usual_s: float | None


def silent_servers(looks: Mapping[Server, StreamLook], settings: RolloutConfig) -> dict[Server, str]:
    """With the reason. `looks`: of all servers that have requests. Where the others are silent too, or slower than
    usual, it is the machine, or whoever looks."""
    if settings.hedge_after_s is None:
        return {}
    least_s = settings.hedge_after_s / settings.hedge_factor
    usual = {server: max(look.usual_s, least_s) for server, look in looks.items() if look.usual_s is not None}
    found = {}
    for server, usual_s in usual.items():
        patience_s, silent_s = settings.hedge_factor * usual_s, looks[server].silent_s
        others = [other for other in looks if other != server]
        if others and median(looks[other].silent_s for other in others) >= patience_s:
            continue
        slower = [looks[other].lately_s / usual[other] for other in others if other in usual]
        if silent_s >= patience_s * max(1.0, median(slower) if slower else 1.0):
            within_s = max(looks[server].usual_s or 0.0, 0.01)
            found[server] = f"no tokens for {silent_s:.1f} s, usually within {within_s:.2g} s"
    return found


def may_take(in_flight: int, *, batch: int, ahead: int, flat: int = 0, most_batches: int = 1) -> int:
    """Prompts that may be taken now. Each step trains on those that were taken first, `batch` of them: what is taken
    at version v, as one of the first (ahead + 1) batches, is trained on at version v + ahead at the latest.

    `flat`: groups in flight that are made and have no signal. They are replaced where less than a batch of others is
    in flight, so that a replacement is always of the next step; that step uses up `most_batches` of prompts at most.
    """
    room = max((ahead + 1) * batch, min(batch + flat, most_batches * batch))
    return max(0, room - in_flight)


def trained_at(place: int, *, version: int, batch: int) -> int:
    """The version at which the prompt at this place among those in flight is trained on."""
    return version + place // batch
