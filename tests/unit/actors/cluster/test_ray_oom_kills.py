"""Which end Ray's state API reports as a kill for memory, from records as it gives them."""

import asyncio
from types import SimpleNamespace

import pytest

from actors.cluster import ray_oom_kills
from actors.cluster.ray_oom_kills import MONITOR_INTERVAL, killed_for_memory, listed_reason

SAID = "1 worker(s) were killed due to the node running low on memory."


def worker(exit_type="NODE_OUT_OF_MEMORY", *, detail=SAID, start=5, is_alive=False):
    return SimpleNamespace(exit_type=exit_type, exit_detail=detail, start_time_ms=start, is_alive=is_alive)


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        ([worker()], SAID),
        ([worker("SYSTEM_ERROR", detail="it was killed")], ""),
        ([worker(detail=None)], ""),
        ([], None),
        ([worker(None, is_alive=True)], None),
        ([worker("SYSTEM_ERROR", start=3), worker(start=7), worker("USER_ERROR", start=None)], SAID),  # pids come again
        ([worker(start=3), worker(None, start=7, is_alive=True)], None),
    ],
)
def test_the_newest_process_of_that_pid_counts(monkeypatch, listed, reason):
    asked = []
    ours = SimpleNamespace(gcs_address="10.0.0.1:6379")
    monkeypatch.setattr(ray_oom_kills.ray, "get_runtime_context", lambda: ours)
    monkeypatch.setattr(
        "ray.util.state.list_workers", lambda **how: asked.append((how["address"], how["filters"])) or listed
    )
    assert listed_reason("node", 42) == reason
    assert asked == [(ours.gcs_address, [("node_id", "=", "node"), ("pid", "=", 42)])], "of no other cluster beside it"


@pytest.fixture
def joined(monkeypatch):
    """A cluster that others started."""
    monkeypatch.setattr(ray_oom_kills.ray, "is_initialized", lambda: True)
    monkeypatch.delenv(MONITOR_INTERVAL, raising=False)


def test_an_end_that_is_not_listed_yet_is_asked_for_again(joined, monkeypatch):
    answers = iter([None, None, SAID])
    monkeypatch.setattr(ray_oom_kills, "listed_reason", lambda node, pid: next(answers))
    assert asyncio.run(killed_for_memory("node", 42)) == SAID


@pytest.mark.parametrize("error", [RuntimeError("no dashboard"), None], ids=["no dashboard", "never listed"])
def test_what_is_not_known_in_time_is_said_in_the_log_alone(joined, monkeypatch, caplog, error):
    def asked(node, pid):
        if error is not None:
            raise error

    monkeypatch.setattr(ray_oom_kills, "listed_reason", asked)
    monkeypatch.setattr(ray_oom_kills, "WITHIN_S", 0.05)
    assert asyncio.run(killed_for_memory("node", 42)) == ""
    assert "ray_kills.not_known pid=42" in caplog.text


def test_where_rays_monitor_is_off_nobody_is_asked(joined, monkeypatch):
    monkeypatch.setenv(MONITOR_INTERVAL, "0")
    monkeypatch.setattr(ray_oom_kills, "listed_reason", lambda node, pid: pytest.fail("asked"))
    assert asyncio.run(killed_for_memory("node", 42)) == ""
