"""How busy this machine is: what tests wait for grows with it. What the launcher promises in seconds does not."""

import asyncio
import os
import shutil
import time

import pytest

QUIET_S = 0.11
"""What `_work` takes on the two quiet cores whose durations docs/measurements.md has."""
AGAIN_S = 30.0
_measured: list[float] = []  # when, and the factor


def factor() -> float:
    """At least 1: by how much longer something may take here, now. Measured anew after half a minute."""
    now = time.monotonic()
    if not _measured or now > _measured[0] + AGAIN_S:
        _work()
        waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
        _measured[:] = [now, max(1.0, (time.monotonic() - now) / QUIET_S, waiting)]
    return _measured[1]


def scaled(seconds: float) -> float:
    """A deadline of so many seconds on a quiet machine. Not for a bound that the launcher itself promises.

    Asked where the deadline begins (`deadline_s = partial(scaled, 60.0)`): a constant of a module would be of the load
    at which the tests were collected.
    """
    return seconds * factor()


def need_programs(*names: str) -> None:
    """Skip the test where the machine has not all of them: what is installed says nothing of what is tested."""
    if missing := [name for name in names if shutil.which(name) is None]:
        pytest.skip(f"not installed: {' '.join(missing)}")


def wait_until(holds, what=""):
    """What `holds()` answers, once that is true. `what` did not come where it stays false for a minute."""
    give_up_at = time.monotonic() + scaled(60)
    while not (found := holds()):
        assert time.monotonic() < give_up_at, what
        time.sleep(0.01)
    return found


async def all_turns() -> None:
    """Until the loop has done all that waits for nothing outside of it: what has not happened by then will not."""
    for _ in range(200):
        await asyncio.sleep(0)


def _work() -> int:
    """So much that others get their turns in between, where there are others."""
    total = 0
    for number in range(2_000_000):
        total ^= number
    return total
