"""A request is tried again so often and no more, and only after a failure that another attempt may not have."""

import pytest

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


async def test_an_attempt_that_succeeds_is_the_last():
    tried = 0
    async for attempt in request_attempts(QUICK):
        with attempt:
            tried += 1
            if tried < 3:
                raise RequestFailed("it is gone", kind="reset")
    assert tried == 3
