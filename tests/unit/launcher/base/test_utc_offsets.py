"""A machine's zone as a run records it: to the second, and readable where nobody knows its name."""

import time
from datetime import UTC, datetime

import pytest

from launcher.base.utc_offsets import local_offsets
from launcher.run_log.run_log import RunLog


def unix(*date):
    return datetime(*date, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("zone", "since", "found"),
    [
        ("UTC", unix(2026, 1, 1), [0]),
        ("Asia/Kathmandu", unix(2026, 1, 1), [20700]),
        ("Europe/Berlin", unix(2026, 1, 1), [3600, (unix(2026, 3, 29, 1), 7200), (unix(2026, 10, 25, 1), 3600)]),
        ("Australia/Sydney", unix(2026, 1, 1), [39600, (unix(2026, 4, 4, 16), 36000), (unix(2026, 10, 3, 16), 39600)]),
        (
            "Australia/Lord_Howe",
            unix(2026, 3, 1),
            [39600, (unix(2026, 4, 4, 15), 37800), (unix(2026, 10, 3, 15, 30), 39600)],
        ),
        ("<-0330>3:30", unix(2026, 1, 1), [-12600]),
    ],
)
def test_the_offsets_of_the_coming_year(monkeypatch, zone, since, found):
    with monkeypatch.context() as changed:
        changed.setenv("TZ", zone)
        time.tzset()
        assert local_offsets(since, 365) == ((since, found[0]), *found[1:])
    time.tzset()


def started(at, offsets, attempt=1):
    return {"event": "run.started", "time": at, "attempt": attempt, "utc_offsets": offsets}


def recorded_offsets(events):
    log = RunLog()
    for event in events:
        log.take_event(event)
    return log.utc_offsets()


def test_each_attempt_counts_until_the_next_begins():
    events = [started(100.0, [[100.0, 3600], [500.0, 7200]]), {"event": "run.finished", "time": 200.0}]
    assert recorded_offsets(events) == ((100.0, 3600), (500.0, 7200))
    events.append(started(300.0, [[300.0, 0]], 2))
    assert recorded_offsets(events) == ((100.0, 3600), (300.0, 0))


@pytest.mark.parametrize("damaged", [None, 3, [[1]], [["x", None]], [None], {}, [[1.0, 10**30], ["NaN", 60]]])
def test_what_is_no_zone_is_none(damaged):
    assert recorded_offsets([started(100.0, damaged)]) == ()
