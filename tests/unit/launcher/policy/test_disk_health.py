"""When a disk stops the run, when it may resume, and what does neither."""

import errno
import os

import pytest

from launcher.base.disk_faults import LEAST_FREE, MIB, UNLIMITED, DiskFault, Refusal, Room, fault_in, fault_of
from launcher.base.errors import CheckpointError
from launcher.config.supervision import DiskConfig
from launcher.policy.disk_health import DiskLook, find_trouble

SETTINGS = DiskConfig(stall_s=30.0)
NOW = 1000.0
ENOUGH = Room(free=100 * MIB, inodes=1000, is_read_only=False)
WELL = DiskLook(path="/run", last_began_at=NOW - 1, room=ENOUGH)


def look(fault=None, *, free=100 * MIB, inodes=1000, is_read_only=False, **more):
    room = Room(free=free, inodes=inodes, is_read_only=is_read_only)
    return DiskLook(path="/run", last_began_at=NOW - 1, fault=fault, room=room, **more)


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (look(DiskFault.FULL, free=0), "/run: no space left, 0.0 MiB free, 1.0 MiB missing"),
        (look(free=LEAST_FREE // 2), "/run: no space left, 0.5 MiB free, 0.5 MiB missing"),
        (look(DiskFault.FULL, inodes=0), "/run: no inodes left, 100.0 MiB free"),
        (look(inodes=0), "/run: no inodes left, 100.0 MiB free"),
        (look(DiskFault.QUOTA, free=2**40), "/run: the quota is exceeded, 1024.0 GiB free"),
        (look(DiskFault.READ_ONLY), "/run: it is read-only, 100.0 MiB free"),
        (look(is_read_only=True), "/run: it is read-only, 100.0 MiB free"),
        (look(is_read_only=True, free=0), "/run: it is read-only, 0.0 MiB free"),
        (look(DiskFault.IO_ERROR), "/run: input/output errors, 100.0 MiB free"),
        (look(DiskFault.IO_ERROR, inodes=0), "/run: input/output errors, 100.0 MiB free"),
        (look(DiskFault.QUOTA, free=1024 * MIB), "/run: the quota is exceeded, 1.0 GiB free"),
        (DiskLook(path="/run", last_began_at=NOW - 1, fault=DiskFault.FULL), "/run: no space left"),
        (look(began_at=NOW - 31), "/run: a write does not return, 100.0 MiB free"),
        (DiskLook(path="/run", began_at=NOW - 31), "/run: a write does not return"),
    ],
)
def test_each_trouble_is_named_with_its_path_and_what_is_missing(seen, reason):
    found = find_trouble([WELL, seen], [], settings=SETTINGS, now=NOW)
    assert found is not None
    assert found.reason == reason


@pytest.mark.parametrize(
    "seen",
    [
        WELL,
        look(free=LEAST_FREE),
        look(inodes=None),  # a filesystem that makes them as they are needed
        look(began_at=NOW - 30),
        DiskLook(path="/run", began_at=NOW - 30),
        DiskLook(path="/run"),
        DiskLook(path="/gone", last_began_at=NOW - 1),  # can't be probed: nothing is known
    ],
)
def test_what_is_no_trouble(seen):
    assert find_trouble([seen], [], settings=SETTINGS, now=NOW) is None


@pytest.mark.parametrize(
    ("seen", "since"),
    [
        (look(began_at=NOW - 40), NOW - 40),
        (look(DiskFault.IO_ERROR, began_at=NOW - 0.5), NOW - 1),
        (DiskLook(path="/run", fault=DiskFault.IO_ERROR), NOW),
    ],
)
def test_a_trouble_is_as_old_as_the_probe_that_met_it(seen, since):
    found = find_trouble([seen], [], settings=SETTINGS, now=NOW)
    assert found is not None
    assert found.since == since


def test_where_nothing_is_known_of_the_room_nothing_is_said_to_be_missing():
    seen = DiskLook(path="/run", last_began_at=NOW - 1, fault=DiskFault.FULL)
    found = find_trouble([seen], [], settings=SETTINGS, now=NOW)
    assert found is not None
    assert (found.missing, found.free) == (0, None)


def test_a_probe_that_waited_for_something_else_has_its_whole_time_afterwards():
    slow = look(began_at=NOW - 500)
    assert find_trouble([slow], [], settings=SETTINGS, now=NOW) is not None
    for excused_at in (NOW, NOW - 29):
        assert find_trouble([slow], [], settings=SETTINGS, now=NOW, excused_at=excused_at) is None
    found = find_trouble([slow], [], settings=SETTINGS, now=NOW, excused_at=NOW - 31)
    assert found is not None
    assert (found.fault, found.since, found.first) == (DiskFault.STALLED, NOW - 31, NOW - 31)


def test_of_a_disk_without_a_size_nothing_is_said_to_be_free_or_missing():
    seen = look(DiskFault.IO_ERROR, free=UNLIMITED)
    found = find_trouble([seen], [], settings=SETTINGS, now=NOW)
    assert found is not None
    assert found.reason == "/run: input/output errors"
    assert find_trouble([look(free=UNLIMITED, inodes=None)], [], settings=SETTINGS, now=NOW) is None


@pytest.mark.parametrize(
    ("fault", "needed", "seen", "is_cured"),
    [
        (DiskFault.FULL, 50 * MIB, look(), True),
        (DiskFault.FULL, 200 * MIB, look(), False),
        (DiskFault.FULL, 200 * MIB, look(free=200 * MIB), True),
        (DiskFault.FULL, 0, look(), True),
        (DiskFault.IO_ERROR, 200 * MIB, look(), True),
        (DiskFault.IO_ERROR, 0, look(DiskFault.IO_ERROR), False),
        (DiskFault.READ_ONLY, 0, DiskLook(path="/run", last_began_at=NOW - 5, room=ENOUGH), False),  # before it
        (DiskFault.READ_ONLY, 0, DiskLook(path="/run", last_began_at=NOW - 3, room=ENOUGH), False),  # with it
        (DiskFault.READ_ONLY, 0, DiskLook(path="/run", last_began_at=NOW - 1), False),  # it could not look
        (DiskFault.FULL, 0, DiskLook(path="/elsewhere", last_began_at=NOW - 1, room=ENOUGH), False),
    ],
)
def test_a_refused_write_stands_until_a_later_probe_finds_room_for_it(fault, needed, seen, is_cured):
    refusal = Refusal(path="/run", fault=fault, at=NOW - 3, needed=needed)
    found = find_trouble([seen], [refusal], settings=SETTINGS, now=NOW)
    assert (found is None) is is_cured
    assert is_cured or (found.path, found.since) == ("/run", NOW - (1 if seen.fault else 3))
    if found is not None and seen.path == "/elsewhere":
        assert (found.free, found.missing) == (None, 0), "nobody has looked at its room"
    if needed == 200 * MIB and found is not None and seen.path == "/run":
        assert found.missing == 100 * MIB
        assert found.free == 100 * MIB


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.ENOSPC, DiskFault.FULL),
        (errno.EDQUOT, DiskFault.QUOTA),
        (errno.EROFS, DiskFault.READ_ONLY),
        (errno.EIO, DiskFault.IO_ERROR),
        (errno.EACCES, None),
        (errno.ENOENT, None),
    ],
)
def test_an_error_of_the_disk_is_known_itself_as_a_cause_and_by_its_text(number, fault):
    error = OSError(number, os.strerror(number))
    assert fault_of(error) is fault
    try:
        raise CheckpointError("not written") from error
    except CheckpointError as caught:
        assert fault_of(caught) is fault
    assert fault_in(f"OSError: {error}") is fault


def test_rusts_text_is_known_and_a_device_that_fails_elsewhere_is_none():
    assert fault_in("Error while serializing: I/O error: No space left on device (os error 28)") is DiskFault.FULL
    assert fault_in("Input/output error (os error 5)") is DiskFault.IO_ERROR
    assert fault_in("NCCL: remote input/output error") is None


def test_a_file_that_may_not_be_written_is_named_in_place_of_its_disk():
    refusal = Refusal(path="/run", fault=DiskFault.REFUSED, at=NOW - 3, file="/run/metrics.jsonl")
    trouble = find_trouble([], [refusal], settings=DiskConfig(), now=NOW)
    assert trouble.reason == "/run/metrics.jsonl: it may not be written"


@pytest.mark.parametrize(
    ("refuses", "is_cured"), [("/run/metrics.jsonl", False), ("/run/other.jsonl", True), ("", True)]
)
def test_a_file_that_was_refused_is_cured_once_it_may_be_written(refuses, is_cured):
    refusal = Refusal(path="/run", fault=DiskFault.REFUSED, at=NOW - 3, file="/run/metrics.jsonl")
    assert (find_trouble([look(refuses=refuses)], [refusal], settings=SETTINGS, now=NOW) is None) is is_cured
