"""A job without supervision is ended for a hang only where the hang stops it."""

import threading
from types import SimpleNamespace

import orjson
import pytest

from scripts.lab import fault_bench


@pytest.fixture
def job(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    ended = threading.Event()
    process = SimpleNamespace(poll=lambda: 0 if ended.is_set() else None)
    return SimpleNamespace(metrics=metrics), process, ended


def step(paths):
    with paths.metrics.open("ab") as file:
        file.write(orjson.dumps({"global_step": 0}) + b"\n")


def test_one_that_takes_no_step_stands_still(job, monkeypatch):
    monkeypatch.setattr(fault_bench, "HANG_S", 0.5)
    paths, process, _ = job
    assert fault_bench.stands_still(process, paths, due=3)


def test_one_that_goes_on_without_the_hung_server_does_not(job):
    paths, process, _ = job
    timers = [threading.Timer(0.2 * n, step, [paths]) for n in range(1, 4)]
    for timer in timers:
        timer.start()
    assert not fault_bench.stands_still(process, paths, due=3)


def test_one_that_ends_does_not(job):
    paths, process, ended = job
    threading.Timer(0.2, ended.set).start()
    assert not fault_bench.stands_still(process, paths, due=3)
