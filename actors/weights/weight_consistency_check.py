"""Checks that a server holds the trainer's weights: one greedy completion, its log-probs against others of the same
weights: the trainer's own, or those of another server.

A version label can be wrong; log-probs can't. With weights that are one version old or damaged in one tensor they
differ, in float32, by orders of magnitude more than with the same weights (thresholds: `gate.*`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from actors.serving.sglang_client import RequestFailed, Sampling
from launcher.base.errors import WeightsRefused
from launcher.base.rollouts import Completion
from launcher.config.schema import RunConfig
from launcher.policy.admission import GateRules, distance_limit

GOLDEN_TOKENS = 16
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=GOLDEN_TOKENS, min_new_tokens=0)
ONE_TOKEN = dataclasses.replace(GREEDY, max_new_tokens=1)
SOON_S = 0.02
TRIES = 5
"""Answers of a version that is not the trainer's, or aborted, while no new weights were on their way to the server. So
many, since another project's trainer ends all requests whenever it pauses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenComparison:
    """The trainer's policy version, and how far a completion's log-probs are from those of `whom`, in nats. `distance`
    None: nobody could be compared with."""

    version: int
    distance: float | None
    whom: str = "the trainer"


def golden_limit(config: RunConfig, usual: float | None = None) -> float:
    """The distance of one server's log-probs that its rounding explains, as at the gate. `usual`: of the run's batches;
    in bfloat16 so few tokens alone are no batch, and may be as far as before it is known."""
    rules = GateRules.of(config)
    limit = distance_limit(rules, usual) if rules.is_exact else config.gate.distance_unknown
    return math.inf if limit is None else limit


async def golden_distance(
    generate: Callable[[], Awaitable[Completion]],
    compare: Callable[[Completion], Awaitable[GoldenComparison]],
    *,
    limit: float,
    name: str,
    settled: Callable[[], int | None],
    within_s: float,
) -> float | None:
    """How far the server's log-probs are, where that is within `limit`; None where nobody could be compared with.

    `settled`: the trainer's version, None while new weights are on their way to the server. While other servers serve,
    the trainer keeps stepping: what is asked across a publish says nothing, and is asked again.

    Raises WeightsRefused where it is not, and where the server's version is never the trainer's; RequestFailed.
    """
    give_up_at, left = time.monotonic() + within_s, TRIES
    while True:
        before = settled()
        if before is None and time.monotonic() < give_up_at:
            await asyncio.sleep(SOON_S)
            continue
        error: WeightsRefused | RequestFailed
        try:
            answer = await generate()
            compared = await compare(answer)
            version = compared.version
            if answer.weight_version == version and before in (None, version):
                return _judge(compared, limit, name)
            expected = version if before is None else before
            error = WeightsRefused(f"{name} answers with weight version {answer.weight_version}, not {expected}")
        except RequestFailed as failure:
            if failure.kind != "aborted":
                raise
            error = failure  # new weights were loaded meanwhile
        left -= before == settled()
        if not left or time.monotonic() >= give_up_at:
            raise error


def logprob_distance(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Mean |server's - own log-prob| of the same tokens, in nats."""
    return fmean(abs(one - other) for one, other in zip(theirs, ours, strict=True))


def _judge(compared: GoldenComparison, limit: float, name: str) -> float | None:
    distance = compared.distance
    if distance is None or (math.isfinite(distance) and distance <= limit):
        return distance
    raise WeightsRefused(
        f"{name} says weight version {compared.version}, but its log-probs are {distance:.2g} from those of "
        f"{compared.whom}, more than {limit:.2g}"
    )
