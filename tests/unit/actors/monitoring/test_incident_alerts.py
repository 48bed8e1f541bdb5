"""Incidents are told from the journal: once each, also across a restart, and at nobody's cost."""

import queue
import threading

import pytest

from actors.monitoring import alerts
from actors.monitoring.incident_alerts import IncidentAlerts
from launcher.config.supervision import AlertsConfig
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_paths import RunPaths
from tests.unit.actors.monitoring.test_alerts import DEADLINE_S, webhook

__all__ = ["webhook"]  # the fixture


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    return paths


def happen(paths, state, number=1, attempt=1):
    facts = {"cause": "server_crash", "doing": "it is being restarted", "is_mended": True, "seconds": 2.5}
    reason = "ended by SIGKILL" if state == "began" else "it serves again"
    Journal(paths.events, attempt).record(
        f"incident.{state}", subject="server-0", reason=reason, incident=number, **facts
    )


def follow(paths, url, attempt=1):
    return IncidentAlerts(AlertsConfig(webhook=url, timeout=5.0), paths, Journal(paths.events, attempt), attempt)


def test_each_is_told_once_also_by_a_successor(paths, webhook):
    url, got, _ = webhook
    happen(paths, "began", number=1, attempt=1)  # nobody lives to tell of it
    happen(paths, "began", number=2, attempt=2)
    first = follow(paths, url, attempt=2)
    for _ in range(3):
        first.refresh()
    began = got.get(timeout=DEADLINE_S)
    assert (began["incident"], began["state"]) == (2, "began")
    assert began["text"].endswith("server-0 crashed (ended by SIGKILL); it is being restarted")
    happen(paths, "ended", number=2, attempt=2)
    second = follow(paths, url, attempt=2)
    second.refresh()
    ended = got.get(timeout=DEADLINE_S)
    assert (ended["incident"], ended["state"]) == (2, "ended")
    assert "is over after 2.5 s: server-0 serves again" in ended["text"]
    first.refresh()  # it knows now what its successor has told
    with pytest.raises(queue.Empty):
        got.get_nowait()
    sent = [event["state"] for event in read_lines(paths.events) if event["event"] == "alert.sent"]
    assert sent == ["began", "ended"]


def test_a_webhook_that_hangs_costs_nobody_any_time(paths, webhook, monkeypatch):
    answers, post = threading.Event(), alerts.Webhook._post
    monkeypatch.setattr(alerts.Webhook, "_post", lambda *message: answers.wait(DEADLINE_S) and post(*message))
    told = follow(paths, webhook[0])
    for number in range(1, 50):
        happen(paths, "began", number)
    told.refresh()  # returns
    assert told._alerts.waiting > 0
    told.wait_told(0.2)  # returns too
    assert told._alerts.waiting > 0
    answers.set()
    told.wait_told(DEADLINE_S)
    assert told._alerts.waiting == told._alerts.missed == 0


def test_a_webhook_that_fails_is_given_up_and_counted(paths, webhook, monkeypatch):
    monkeypatch.setattr(alerts, "PAUSE_S", 0.01)
    url, got, statuses = webhook
    statuses[:] = [500]
    told = follow(paths, url)
    happen(paths, "began")
    told.refresh()
    told.wait_told(DEADLINE_S)
    assert told._alerts.missed == 1
    assert [got.get(timeout=DEADLINE_S)["state"] for _ in range(alerts.TRIES)] == ["began"] * alerts.TRIES


def test_many_threads_are_not_needed(paths, webhook):
    before = threading.active_count()
    follow(paths, webhook[0])
    assert threading.active_count() == before + 1
