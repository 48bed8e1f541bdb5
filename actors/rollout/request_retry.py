"""Retries of a generation request: how often, and with which back-off and jitter."""

from __future__ import annotations

from collections.abc import AsyncIterable

import stamina
from stamina import Attempt

from actors.serving.sglang_client import RequestFailed
from launcher.config.schema import RolloutConfig


def request_attempts(config: RolloutConfig) -> AsyncIterable[Attempt]:
    """The first attempt and `rollout.request_retries` more. Only a RequestFailed that is `retryable` is tried again."""
    return stamina.retry_context(
        on=lambda error: isinstance(error, RequestFailed) and error.retryable,
        attempts=config.request_retries + 1,
        timeout=None,
        wait_initial=config.retry_wait_initial,
        wait_max=config.retry_wait_max,
        wait_jitter=config.retry_wait_initial,
    )
