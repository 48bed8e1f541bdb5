"""Incidents are reported from the journal: once each, also across a restart, and at nobody's cost."""

import queue
import threading

import pytest

from actors.monitoring import alerts
from actors.monitoring.alerts import IncidentAlerts
from launcher.config.supervision import AlertsConfig
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_keys import keep_webhook
from tests.support.worlds.alerts import deadline_s
from tests.support.worlds.alerts import webhook as webhook


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(alerts, "PAUSE_S", 0.01)
    monkeypatch.setattr(alerts, "LOOK_S", 0.01)


def happen(paths, state, number=1, attempt=1):
    facts = {"cause": "server_crash", "doing": "it is being restarted", "is_mended": True, "seconds": 2.5}
    reason = "ended by SIGKILL" if state == "began" else "it serves again"
    Journal(paths.events, attempt).record(
        f"incident.{state}", subject="server-0", reason=reason, incident=number, **facts
    )


def follow(paths, url, attempt=1):
    shown = keep_webhook(url, paths.keys)
    return IncidentAlerts(AlertsConfig(webhook=shown, timeout=5.0), paths, Journal(paths.events, attempt), attempt)


def test_each_is_reported_once_also_by_a_successor(paths, webhook):
    url, got, _ = webhook
    happen(paths, "began", number=1, attempt=1)  # nobody was there to report it
    happen(paths, "began", number=2, attempt=2)
    first = follow(paths, url, attempt=2)
    for _ in range(3):
        first.refresh()
    began = got.get(timeout=deadline_s())
    assert (began["run"], began["incident"], began["state"]) == ("exp/t0", 2, "began")
    assert began["title"] == "server_crash: server-0"
    assert began["text"].endswith("server-0 crashed (ended by SIGKILL); it is being restarted")
    happen(paths, "ended", number=2, attempt=2)
    second = follow(paths, url, attempt=2)
    second.refresh()
    ended = got.get(timeout=deadline_s())
    assert (ended["incident"], ended["state"], ended["title"]) == (2, "ended", began["title"])
    assert "is over after 2.5 s: server-0 serves again" in ended["text"]
    first.refresh()  # it has read by now what its successor has sent
    with pytest.raises(queue.Empty):
        got.get_nowait()
    sent = [event["state"] for event in read_lines(paths.events) if event["event"] == "alert.sent"]
    assert sent == ["began", "ended"]


def test_a_run_that_takes_no_step_is_reported_each_time_and_by_one_of_two(paths, webhook):
    url, got, _ = webhook
    first, second = follow(paths, url), follow(paths, url)
    for name, why in (("late", "no step for 60 s"), ("came", "a step came"), ("late", "no step for 70 s")):
        Journal(paths.events, 1).record(f"step.{name}", subject="trainer", reason=why)
        first.refresh()
        message = got.get(timeout=deadline_s())
        assert (message["incident"], message["state"], message["title"]) == (None, name, "no step")
        assert message["text"] == f"exp/t0: no step: {why}"
    second.refresh()
    with pytest.raises(queue.Empty):
        got.get_nowait()


def test_a_webhook_that_fails_for_a_moment_is_tried_again(paths, webhook):
    url, got, statuses = webhook
    statuses[:] = [503, 200]
    alerting = follow(paths, url)
    happen(paths, "began")
    alerting.refresh()
    assert got.get(timeout=deadline_s()) == got.get(timeout=deadline_s())
    assert alerting.missed == 0


def test_a_webhook_that_fails_is_given_up_and_counted(paths, webhook):
    url, got, statuses = webhook
    statuses[:] = [500]
    alerting = follow(paths, url)
    happen(paths, "began")
    alerting.refresh()
    assert alerting.missed == 1
    assert [got.get(timeout=deadline_s())["state"] for _ in range(alerts.TRIES)] == ["began"] * alerts.TRIES


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/secret", "http://127.0.0.1:9/secret\n"])
def test_one_that_refuses_is_named_without_its_secret(paths, caplog, url):
    alerting = follow(paths, url)
    happen(paths, "began")
    alerting.refresh()
    assert alerting.missed == 1
    assert "alert.missed" in caplog.text
    assert "secret" not in caplog.text


def test_an_error_that_nobody_expected_costs_one_message_and_not_those_after_it(paths, webhook, monkeypatch):
    """The task that read the journal had ended unheard, and no later incident was reported."""
    url, got, _ = webhook
    fails, alert_of = [KeyError("a defect")], alerts.alert_of
    monkeypatch.setattr(alerts, "alert_of", lambda event: fail(fails.pop()) if fails else alert_of(event))
    alerting = follow(paths, url)
    happen(paths, "began", 1)
    happen(paths, "began", 2)
    alerting.start()
    assert got.get(timeout=deadline_s())["incident"] == 2
    alerting.finish(deadline_s())
    assert alerting.missed == 1


def fail(error):
    raise error


@pytest.mark.slow
def test_a_webhook_that_hangs_costs_nobody_any_time(paths, webhook, monkeypatch):
    answers, post = threading.Event(), IncidentAlerts._post
    monkeypatch.setattr(IncidentAlerts, "_post", lambda *message: answers.wait(deadline_s()) and post(*message))
    before = threading.active_count()
    alerting = follow(paths, webhook[0])
    for number in range(1, 50):
        happen(paths, "began", number)
    alerting.start()  # returns
    assert threading.active_count() == before + 1
    alerting.finish(0.2)  # returns too
    assert webhook[1].empty()
    answers.set()
    alerting.finish(deadline_s())
    assert [webhook[1].get_nowait()["incident"] for _ in range(49)] == [*range(1, 50)]
    assert alerting.missed == 0


def test_what_the_journal_holds_at_the_end_is_sent_before_it_finishes(paths, webhook):
    alerting = follow(paths, webhook[0])
    alerting.start()
    happen(paths, "began")
    alerting.finish(deadline_s())
    assert webhook[1].get_nowait()["state"] == "began"
