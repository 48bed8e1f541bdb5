"""Asks a broken reward function for its known answers, while training is paused for it: no batch shows then whether it
works again."""

from __future__ import annotations

import asyncio
import contextlib
import time

from actors.supervision.cluster_observer import ClusterObserver
from actors.supervision.monitor_handle import MonitorHandle
from launcher.base.errors import LauncherError
from launcher.base.messages import Cause
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.canary_policy import SOONEST_S, CanaryRound, is_sound, may_be_tried, until_next_round_s

ANSWER_S = 60.0


async def ask_the_verifier_again(
    observer: ClusterObserver, monitor: MonitorHandle, settings: RewardHealthConfig
) -> None:
    """For as long as the run lasts. The monitor hears of each round; after a sound one the next comes at once: training
    waits only for as many in a row as clear it."""
    trainer, wait_s = observer.trainer, SOONEST_S
    since: float | None = None
    tried_at = 0.0
    while True:
        await asyncio.sleep(wait_s)
        now, wait_s = time.monotonic(), SOONEST_S
        incident = observer.incident(now)
        if incident is None or incident.cause is not Cause.VERIFIER_BROKEN or trainer.view.is_running:
            since = None
            continue
        since = now if since is None else since
        was_sound = False
        with contextlib.suppress(LauncherError):
            scored: CanaryRound = await trainer.call("score_canaries", within_s=ANSWER_S)
            was_sound = is_sound(scored, settings) and bool(scored.scores)
            tried_at = max(tried_at, incident.since)  # no pause is seen from its beginning
            if may_be_tried(scored, settings, paused_s=now - tried_at, failing_s=tried_at - incident.since):
                trainer.reward_answers()
                tried_at = now
            await monitor.canaries(scored)
        wait_s = 0.0 if was_sound else until_next_round_s(time.monotonic() - since)
