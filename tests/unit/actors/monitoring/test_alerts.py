"""Each incident is told once and its end once; a way out that fails or hangs hurts neither the run nor the others."""

import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from actors.monitoring import alerts
from actors.monitoring.alerts import Alerts
from launcher.config.supervision import AlertsConfig

DEADLINE_S = 30.0


@pytest.fixture
def webhook():
    """A real HTTP server: its url, what it got, and the statuses it answers with, the last one for ever."""
    got, statuses = queue.Queue(), [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(statuses[0] if len(statuses) == 1 else statuses.pop(0))
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/secret", got, statuses
    server.shutdown()
    server.server_close()


def test_begin_and_end_are_told_once_each(webhook):
    url, got, _ = webhook
    told = Alerts(AlertsConfig(webhook=url), run="exp/t0")
    for _ in range(3):
        told.began(4, "server_hang server-0", "stopped for 3.1 s")
    for _ in range(3):
        told.ended(4, "back after 9 s")
    told.ended(5, "of which nobody was told")
    told.began(6, "the last", "")
    messages = [got.get(timeout=DEADLINE_S) for _ in range(3)]
    assert [(m["incident"], m["state"]) for m in messages] == [(4, "began"), (4, "ended"), (6, "began")]
    assert messages[1]["text"] == "exp/t0: incident 4 ended: server_hang server-0: back after 9 s"


def test_a_webhook_that_fails_for_a_moment_is_tried_again(webhook, monkeypatch):
    monkeypatch.setattr(alerts, "PAUSE_S", 0.01)
    url, got, statuses = webhook
    statuses[:] = [503, 200]
    told = Alerts(AlertsConfig(webhook=url), run="exp/t0")
    told.began(1, "a", "b")
    assert got.get(timeout=DEADLINE_S) == got.get(timeout=DEADLINE_S)
    assert told.missed == 0


def test_one_that_refuses_is_given_up_and_counted_without_its_secret(monkeypatch, caplog):
    monkeypatch.setattr(alerts, "PAUSE_S", 0.01)
    missed = threading.Event()
    monkeypatch.setattr(alerts.Sink, "_miss", seen(alerts.Sink._miss, missed))
    told = Alerts(AlertsConfig(webhook="http://127.0.0.1:9/secret"), run="exp/t0")
    told.began(1, "a", "b")
    assert missed.wait(DEADLINE_S)
    assert told.missed == 1
    assert "127.0.0.1" in caplog.text
    assert "secret" not in caplog.text


def seen(method, event):
    def call(self, why):
        method(self, why)
        event.set()

    return call


def test_one_that_hangs_or_raises_keeps_only_itself_from_hearing_more():
    heard, release = queue.Queue(), threading.Event()

    def hang(alert):
        release.wait()

    def fail(alert):
        raise RuntimeError("of any kind")

    told = Alerts(AlertsConfig(), run="exp/t0", sends={"hangs": hang, "fails": fail, "hears": heard.put})
    for number in range(2 * alerts.MOST_QUEUED):
        told.began(number, "a", "b")  # returns, whatever they do
        heard.get(timeout=DEADLINE_S)
    assert told.missed >= alerts.MOST_QUEUED - 1
    release.set()


def test_without_a_webhook_nothing_is_sent():
    told = Alerts(AlertsConfig(), run="exp/t0")
    told.began(1, "a", "b")
    assert told.missed == 0
