"""Retries of a generation request: how often, and with which back-off and jitter."""

from __future__ import annotations

from collections.abc import AsyncIterable

import stamina
from stamina import Attempt

from actors.rollout.request_loop import NOBODY_THERE
from actors.serving.sglang_client import RequestFailed
from launcher.config.schema import RolloutConfig


def request_attempts(config: RolloutConfig) -> AsyncIterable[Attempt]:
    """The first attempt and `rollout.request_retries` more. Only a RequestFailed that is `retryable` is tried again.

    After the first connection that breaks there is no wait: its server is SUSPECT, and another can continue now. After
    further ones there is: where all servers have died at once, each would else use up an attempt within milliseconds.
    """
    has_moved = False

    def may_try_again(error: Exception) -> bool | float:
        nonlocal has_moved
        if not (isinstance(error, RequestFailed) and error.retryable):
            return False
        if error.kind not in NOBODY_THERE or has_moved:
            return True
        has_moved = True
        return 0.0

    return stamina.retry_context(
        on=may_try_again,
        attempts=config.request_retries + 1,
        timeout=None,
        wait_initial=config.retry_wait_initial,
        wait_max=config.retry_wait_max,
        wait_jitter=config.retry_wait_initial,
    )
