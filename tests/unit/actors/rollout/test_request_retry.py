"""A request is tried again so often and no more, and only after a failure that another attempt may not have."""

import pytest
from stamina.instrumentation import set_on_retry_hooks

from actors.rollout.request_retry import request_attempts
from launcher.base.errors import RequestFailed
from launcher.config.schema import RolloutConfig

QUICK = RolloutConfig(request_retries=3, retry_wait_initial=0.001, retry_wait_max=0.01)


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (RequestFailed("it is gone", kind="reset"), 4),
        (RequestFailed("too long a prompt", kind="http_4xx", retryable=False), 1),
        (ValueError("of the launcher's own"), 1),
    ],
)
async def test_which_failures_are_tried_again(error, times):
    tried = 0
    with pytest.raises(type(error)) as raised:
        async for attempt in request_attempts(QUICK):
            with attempt:
                tried += 1
                raise error
    assert (tried, raised.value) == (times, error)


@pytest.mark.parametrize(
    ("kinds", "waits"),
    [
        (["reset", "reset", "refused"], [False, True, True]),
        (["http_5xx", "truncated", "timeout"], [True, False, True]),
        (["malformed", "http_5xx", "timeout"], [True, True, True]),
    ],
)
async def test_the_first_connection_that_breaks_is_not_waited_after(kinds, waits):
    """Another server could continue at once, and stood idle for 0.2 to 0.4 s. All may be gone: then time is what the
    next ones need."""
    waited, left = [], list(kinds)
    set_on_retry_hooks([lambda details: waited.append(details.wait_for > 0)])
    try:
        async for attempt in request_attempts(QUICK):
            with attempt:
                if left:
                    raise RequestFailed("it is gone", kind=left.pop(0))
    finally:
        set_on_retry_hooks(None)
    assert waited == waits


async def test_an_attempt_that_succeeds_is_the_last():
    tried = 0
    async for attempt in request_attempts(QUICK):
        with attempt:
            tried += 1
            if tried < 3:
                raise RequestFailed("it is gone", kind="reset")
    assert tried == 3
