"""Whether a memory cgroup may be made here."""

import os

import pytest

from actors.processes.process_tree import identify
from launcher.base.errors import UsageError
from scripts.faults import memory_faults


def may_make_a_cgroup() -> bool:
    try:
        memory_faults.memory_cgroup(identify(os.getpid()))
    except UsageError:
        return False
    return True


NEEDS_A_CGROUP = pytest.mark.skipif(
    not may_make_a_cgroup(), reason="no memory cgroup of version 1 that may be written to"
)
