"""A notice that the machine is taken away is seen where it is; what can't be read is unknown, and told once."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from launcher.cli import preemption_notice
from launcher.cli.preemption_notice import NoticeWatch, UnreadableNotice, is_notice
from launcher.config.settings import with_values
from launcher.resources.config_checks import find_problems
from launcher.run_files.journal import Journal, read_lines
from tests.support.composed import composed
from tests.support.machine import wait_until


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (404, "<html>Not Found", False),
        (200, "FALSE", False),
        (200, "NONE\n", False),
        (200, "TRUE", True),
        (200, '{"action": "terminate", "time": "2026-11-22T14:00:00Z"}', True),
        (200, '{"action": "hibernate", "time": "2026-11-22T14:00:00Z"}', True),
        (200, '{"DocumentIncarnation": 2, "Events": []}', False),
        (200, '{"Events": [{"EventType": "Reboot"}]}', False),
        (200, '{"Events": [{"EventType": "Freeze"}, {"EventType": "Preempt"}]}', True),
    ],
)
def test_what_the_clouds_answer(status, text, says):
    assert is_notice(status, text) is says


@pytest.mark.parametrize(
    ("status", "text"), [(401, ""), (500, "TRUE"), (200, "<html>Log in"), (200, ""), (200, "[]"), (200, '{"a": 1}')]
)
def test_anything_else_is_unknown(status, text):
    with pytest.raises(UnreadableNotice):
        is_notice(status, text)


class Metadata(ThreadingHTTPServer):
    """As AWS's: no answer without the token of a PUT before; `notice` is what there is."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.notice = ""
        self.hangs = threading.Event()
        self.looks = 0
        self.hangs.set()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/latest/meta-data/spot/instance-action"


class Answer(BaseHTTPRequestHandler):
    def do_PUT(self):
        self.say(200 if self.path == "/latest/api/token" else 404, "a token")

    def do_GET(self):
        self.server.looks += 1
        self.server.hangs.wait(60)
        if self.headers["X-aws-ec2-metadata-token"] != "a token":
            self.say(401, "")
        else:
            self.say(200 if self.server.notice else 404, self.server.notice)

    def say(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata():
    server = Metadata()
    yield server
    server.hangs.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def watch(tmp_path):
    started = []

    def make(where):
        watch = NoticeWatch(where, Journal(tmp_path / "events.jsonl", 1, time.time), interval_s=0.01)
        watch.events = lambda: [event["reason"] for event in read_lines(tmp_path / "events.jsonl")]
        started.append(watch)
        return watch

    yield make
    for one in started:
        one.stop()


def test_a_url_is_asked_with_the_token_that_aws_wants(watch, metadata):
    one = watch(metadata.url)
    assert one.look_for_notice() is False
    metadata.notice = '{"action": "terminate", "time": "2026-11-22T14:00:00Z"}'
    one.start()
    wait_until(lambda: one.seen_at is not None)
    assert one.events() == []


def test_nobody_there_is_told_once_and_is_no_notice(watch, metadata, monkeypatch):
    url = metadata.url
    metadata.shutdown()
    metadata.server_close()
    one, looks = watch(url), []
    look = one.look_for_notice
    monkeypatch.setattr(one, "look_for_notice", lambda: looks.append(1) or look())
    one.start()
    wait_until(lambda: len(looks) > 10)  # ten have failed
    (told,) = one.events()
    assert told == f"run.preemption_notice={url} can't be read, which is no notice: no answer: ConnectError"
    assert one.seen_at is None


def test_an_address_that_hangs_costs_its_own_thread_a_bounded_time(watch, metadata, monkeypatch):
    monkeypatch.setattr(preemption_notice, "ANSWER_S", 0.05)
    metadata.hangs.clear()
    one = watch(metadata.url)
    one.start()
    wait_until(lambda: metadata.looks >= 3)
    assert one.events() == [
        f"run.preemption_notice={metadata.url} can't be read, which is no notice: no answer: ReadTimeout"
    ]


def test_a_file_whose_disk_does_not_answer_is_told_once(watch, tmp_path, monkeypatch):
    """As of a file server that is gone: no notice would ever be seen, and nobody knew."""
    monkeypatch.setattr(preemption_notice, "STUCK_S", 0.05)
    one, over, begun = watch(str(tmp_path / "notice")), threading.Event(), threading.Event()
    monkeypatch.setattr(one, "_look_at_file", lambda file: begun.set() or over.wait(60))
    one.tell_if_stuck()
    one.start()
    assert begun.wait(60)
    wait_until(lambda: one.tell_if_stuck() or one.events())
    one.tell_if_stuck()
    (told,) = one.events()
    assert told.endswith("/notice can't be read, which is no notice: no answer for 0.05 s")
    over.set()


def test_a_file_is_a_notice_once_it_is_there(watch, tmp_path):
    one = watch(str(tmp_path / "notice"))
    assert one.look_for_notice() is False
    (tmp_path / "notice").touch()
    assert one.look_for_notice() is True


def test_a_file_that_can_not_be_looked_for_is_unknown(watch, tmp_path):
    (tmp_path / "no folder").touch()
    with pytest.raises(UnreadableNotice, match="Not a directory"):
        watch(str(tmp_path / "no folder" / "notice")).look_for_notice()


@pytest.mark.parametrize(
    ("where", "is_allowed"),
    [
        ("http://169.254.169.254/latest/meta-data/spot/instance-action", True),
        ("https://host/path", True),
        ("/run/notice", True),
        ("notice.txt", True),
        ("s3://bucket/notice", False),
        ("http://", False),
        ("", False),
    ],
)
def test_which_values_are_allowed(where, is_allowed):
    config = with_values(composed("conf=arithmetic_cpu"), {"run.preemption_notice": where})
    assert (find_problems(config) == []) is is_allowed
