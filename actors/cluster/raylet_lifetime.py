"""An actor's life tied to its raylet's.

Ray's own check in a worker is `kill(pid, 0)`, for which a zombie lives: where the raylet's parent doesn't collect it
(a driver that called `ray.init()`, a container without an init), actors outlive their node for ever.
"""

from __future__ import annotations

import os
import select
import threading

RAYLET_GONE = 7
"""Exit code of a worker that ended because its raylet had."""


def raylet_pid() -> int | None:
    """None outside a Ray worker."""
    pid = os.environ.get("RAY_RAYLET_PID")
    return int(pid) if pid else None


def die_with_raylet() -> None:
    """From now on this process ends when its raylet does, zombie or not (40 ms). Nothing outside a Ray worker."""
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
