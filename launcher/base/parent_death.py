"""Ties a process to its parent: the kernel sends it a signal when the parent is gone (PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def end_with(parent: int, number: signal.Signals, *, code: int) -> Callable[[], None]:
    """To be called in the child, before its exec where there is one. It exits with `code` where `parent` is gone.

    The signal comes when the thread that started the child ends, and stays set over an exec.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:
            os._exit(code)

    return tie


def adopt_orphans() -> None:
    """Whatever a descendant of this process leaves behind becomes its child, in place of a child of pid 1."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
