"""What a refused write is called: by its errno, and by what the filesystem itself reports."""

import errno
import os
import subprocess

import pytest

from launcher.base.disk_faults import FEW_INODES, LEAST_FREE, MIB, DiskFault, Room, fault_beside, fault_of
from launcher.base.durable import refusal_of, room


@pytest.mark.parametrize(
    ("fault", "free", "inodes", "called"),
    [
        (DiskFault.FULL, 5 * MIB, 0, DiskFault.NO_INODES),
        (DiskFault.FULL, 5 * MIB, FEW_INODES - 1, DiskFault.NO_INODES),
        (DiskFault.FULL, 5 * MIB, FEW_INODES, DiskFault.FULL),
        (DiskFault.FULL, 5 * MIB, None, DiskFault.FULL),
        (DiskFault.FULL, 5 * MIB - 1, 0, DiskFault.FULL),
        (DiskFault.QUOTA, 5 * MIB, 0, DiskFault.QUOTA),
    ],
)
def test_no_space_left_is_inodes_where_the_bytes_would_fit(fault, free, inodes, called):
    found = Room(free=free, inodes=inodes, is_read_only=False)
    assert fault_beside(fault, found, 5 * MIB) is called
    unknown = Room(free=LEAST_FREE - 1, inodes=inodes, is_read_only=False)
    assert fault_beside(fault, unknown, 0) is fault


@pytest.fixture
def few_inodes(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=50", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a filesystem needs root")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_of_a_filesystem_without_inodes_that_is_what_a_refusal_says(few_inodes):
    made = 0
    with pytest.raises(OSError, match="No space left") as refused:
        while True:
            os.close(os.open(few_inodes / str(made), os.O_CREAT | os.O_WRONLY))
            made += 1
    assert refused.value.errno == errno.ENOSPC
    assert room(few_inodes).free >= LEAST_FREE
    told = refusal_of(few_inodes, fault_of(refused.value))
    assert (told.path, told.fault, told.needed) == (str(few_inodes), DiskFault.NO_INODES, 0)


def test_where_nothing_can_be_looked_at_it_is_called_by_its_errno(tmp_path):
    assert refusal_of(tmp_path / "gone", DiskFault.FULL).fault is DiskFault.FULL
