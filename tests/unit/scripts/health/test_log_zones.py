"""check_health reads the dates of logs in the zone that they were written in, whatever this machine's is."""

import os
import time

import pytest

from scripts.health.areal_run import _tables
from scripts.health.log_check import errors_in

SUMMER = 1_768_000_000.0
"""Southern summer: 2026-01-09 23:06:40 UTC."""
ERROR = "ConnectionRefusedError: [Errno 111] Connection refused"


def stamp(unix, east_h=None):
    at = time.localtime(unix) if east_h is None else time.gmtime(unix + east_h * 3600)
    return time.strftime("%Y-%m-%d %H:%M:%S", at)


def written(path, *lines, at):
    path.write_text("".join(f"{line}\n" for line in lines))
    os.utime(path, (at, at))
    return path


@pytest.mark.parametrize(
    "name", ["UTC", "Australia/Sydney", "Australia/Adelaide", "America/New_York", "Asia/Kathmandu"]
)
@pytest.mark.parametrize("east_h", [None, 0.0, 10.5, -3.5, 5.75])
def test_an_error_is_as_old_as_it_is(tmp_path, zone, name, east_h):
    """25 minutes old; under Australia/Sydney it was `bad, 0 s ago`. `east_h`: the log's zone; None: the machine's."""
    zone(name)
    lines = (f"{stamp(SUMMER - 1500, east_h)},250 {ERROR}", f"{stamp(SUMMER, east_h)},500 trainer INFO: on")
    (one,) = errors_in(written(tmp_path / "trainer.log", *lines, at=SUMMER + 1))
    assert one.last == pytest.approx(SUMMER - 1500, abs=1.0)


@pytest.mark.parametrize("name", ["UTC", "Asia/Tokyo"])
def test_a_zone_in_the_date_counts(tmp_path, zone, name):
    zone(name)
    lines = ("2026-01-09T22:00:00Z " + ERROR, "2026-01-10T04:15:00.123456789+05:45 " + ERROR)
    (one,) = errors_in(written(tmp_path / "a.log", *lines, at=SUMMER))
    assert (one.first, one.last) == (SUMMER - 4000, pytest.approx(SUMMER - 2200, abs=0.2))


def test_what_no_zone_explains_has_no_time(tmp_path, zone):
    zone("UTC")
    (one,) = errors_in(written(tmp_path / "a.log", f"{stamp(SUMMER - 5 * 3600)} {ERROR}", at=SUMMER + 400))
    assert (one.count, one.first, one.last) == (1, None, None)


@pytest.mark.parametrize("east_h", [0.0, 9.0])
def test_the_steps_of_areals_run_are_as_old_as_they_are(zone, east_h):
    zone("Australia/Sydney")
    data = f"{stamp(SUMMER - 3, east_h)},100 StatsLogger INFO: Epoch 1/2 Step 2/80 Train step 2/160 done.\n".encode()
    ((at, table),) = _tables(data, SUMMER)
    assert (table.global_step, at) == (1, pytest.approx(SUMMER - 3, abs=1.0))
