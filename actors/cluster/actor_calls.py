"""Calls to actors that may be restarting, hung or gone: each has a deadline, and raises only our errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from ray.exceptions import RayError, RayTaskError

from launcher.base.errors import LauncherError, RunError


class ActorAway(RunError):
    """An actor did not answer: it is restarting, hangs, or is gone. Nothing is known of what it did."""


async def answer(call: Awaitable[Any], *, within_s: float, of: str) -> Any:
    """The value of one call. Raises what the actor raised, ActorAway where it raised nothing of its own."""
    try:
        async with asyncio.timeout(within_s):
            return await call
    except RayTaskError as error:
        if isinstance(error.cause, LauncherError):
            raise error.cause from None
        raise RunError(f"{of} failed: {error.cause!r}", "this is a defect; see the logs of its actor") from error
    except RayError as error:  # an actor that Ray ended for the machine's memory is no RayActorError
        raise ActorAway(f"{of} is not there: {str(error).partition(chr(10))[0] or type(error).__name__}") from error
    except TimeoutError as error:
        raise ActorAway(f"{of} did not answer within {within_s:g} s") from error


async def call_method(actor: Any, method: str, *arguments: Any, within_s: float, of: str) -> Any:
    """`answer` of a call of `method`. Ray refuses one that the actor's class does not take before it is sent, in the
    caller's process: without this it would pass for a defect of the caller."""
    try:
        call = getattr(actor, method).remote(*arguments)
    except (TypeError, AttributeError) as error:
        raise RunError(
            f"{of} failed: its class does not take this call of {method}: {error!r}", "this is a defect of that class"
        ) from error
    return await answer(call, within_s=within_s, of=of)


def as_ours(error: RayTaskError) -> LauncherError:
    """What ended the Coordinator, as the error that it raised."""
    if isinstance(error.cause, LauncherError):
        return error.cause
    return RunError(f"the Coordinator failed: {error.cause!r}", "this is a defect; events.jsonl says what it did last")
