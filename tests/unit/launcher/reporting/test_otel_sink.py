"""OpenTelemetry: the run's trace is what its files say, over all attempts; no collector makes a run wait or end."""

import gzip
import http.server
import logging
import os
import subprocess
import sys
import threading

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from launcher.base.addresses import free_port
from launcher.base.errors import ConfigError
from launcher.base.messages import RunOutcome, TerminalStatus
from launcher.cli import run_screen
from launcher.cli.run_screen import Screen
from launcher.reporting import otel_sink
from launcher.reporting.otel_sink import OtelSink
from launcher.resources.missing_machine import missing_writer
from tests.support.composed import composed
from tests.support.machine import scaled
from tests.support.worlds.reporting import NOW

T0 = 1_800_000_000
ON = ["conf=arithmetic_cpu", "stats_logger.otel.exporter=otlp"]
CRASH = {"incident": 3, "cause": "server_crash", "subject": "server-0"}
OUTCOMES = {status: RunOutcome(status=status, reason="so it ended") for status in TerminalStatus}


@pytest.fixture(autouse=True)
def as_no_environment_says(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    yield
    logging.getLogger("opentelemetry").setLevel(logging.NOTSET)


@pytest.fixture
def sent(monkeypatch):
    exporter = InMemorySpanExporter()
    exporter.shutdown = lambda: None  # it would take nothing of another attempt
    monkeypatch.setattr(otel_sink, "make_exporter", lambda: exporter)
    return exporter


def line(step, at, *, took=10.0, **more):
    return {"global_step": step, "attempt": 1, "time": T0 + at, "timeperf/step_s": took, **more}


def event(name, at, **facts):
    return {"event": name, "time": T0 + at, "attempt": 1, **facts}


def trace_of(paths, *told, attempt=1, outcome=None):
    """What an attempt sends that is told these events and steps."""
    said = []
    sink = OtelSink(composed(*ON), paths, attempt, say=said.append)
    for one in told:
        (sink.follow if "event" in one else sink.log)(one)
    if outcome is not None:
        sink.end(OUTCOMES[outcome])
    sink.finish()
    assert said == []


def spans_of(exporter):
    """By their step; that of the attempt by None."""
    return {span.attributes.get("rl.loop.iteration"): span for span in exporter.get_finished_spans()}


def seconds(span):
    return (span.start_time / 1e9 - T0, span.end_time / 1e9 - T0)


def events_of(span):
    return [(one.name, one.timestamp / 1e9 - T0) for one in span.events]


def test_what_is_no_unicode_costs_no_span(paths, sent):
    """A file's name with a byte that is none: OTLP's encoder gave up all spans that were sent with it."""
    sink = OtelSink(composed(*ON), paths, 1, say=lambda text: None)
    sink.follow(event("incident.began", 5, **CRASH, reason="no \udcff.json"))
    sink.log(line(0, 10))
    sink.end(RunOutcome(status=TerminalStatus.ERRORED, reason="no \udcff.json"))
    sink.finish()
    encoded = encode_spans(sent.get_finished_spans()).resource_spans[0].scope_spans[0].spans
    assert [one.name for one in encoded] == ["rl.loop", "grpo.attempt"]
    assert encoded[1].status.message == "no \\udcff.json"
    assert "no \\udcff.json" in [one.value.string_value for one in encoded[0].events[0].attributes]


def test_a_step_is_a_span_of_the_run_below_its_attempt(paths, sent):
    figures = {
        "epoch": 2,
        "policy_version": 8,
        "rollout/reward": 0.75,
        "rollout/tokens": 640.0,
        "timeperf/rollout_s": 6.0,
        "timeperf/train_s": 3.0,
        "timeperf/publish_s": 0.5,
    }
    paths.run_id.write_text("0123abcd\n")
    trace_of(paths, line(7, 100, **figures))
    span, attempt = spans_of(sent)[7], spans_of(sent)[None]
    assert (span.name, seconds(span)) == ("rl.loop", (90.0, 100.0))
    assert dict(span.attributes) == {
        "rl.loop.iteration": 7,
        "rl.reward.score": 0.75,
        "rl.loop.duration": 10.0,
        "rl.sample.duration": 6.0,
        "rl.train.duration": 3.0,
        "rl.sync.duration": 0.5,
        "grpo.rollout_tokens": 640.0,
        "grpo.attempt": 1,
        "grpo.epoch": 2,
        "grpo.policy_version": 8,
    }
    assert (attempt.name, attempt.parent, span.parent) == ("grpo.attempt", None, attempt.context)
    run = {
        key: value
        for key, value in span.resource.attributes.items()
        if key.startswith(("rl.", "grpo.", "service.name"))
    }
    assert run.pop("rl.model.name").endswith("assets/arithmetic/model")
    assert run.pop("rl.system.version")
    assert run == {
        "service.name": "grpo-launcher",
        "rl.system": "grpo-launcher",
        "rl.run.id": "0123abcd",
        "rl.algorithm": "grpo",
        "grpo.experiment_name": "exp",
        "grpo.trial_name": "t0",
    }


def test_an_incident_is_an_event_of_the_step_that_it_delayed(paths, sent):
    trace_of(
        paths,
        event("incident.began", 25, **CRASH, reason="SIGKILL\nof pid 7", onset_step=None, doing="restart"),
        line(0, 20),  # events are read first: one may be younger than the steps that are read with it
        event("server.restarting", 26, subject="server-0", incident=3),
        event("incident.ended", 41, **CRASH, reason="it serves again", is_mended=True, seconds=16.0),
        line(1, 45),
        line(2, 55),
    )
    spans = spans_of(sent)
    assert [seconds(spans[step]) for step in (0, 1, 2)] == [(10.0, 20.0), (25.0, 45.0), (45.0, 55.0)]
    assert events_of(spans[1]) == [("incident.began", 25.0), ("incident.ended", 41.0)]
    assert not spans[0].events
    assert not spans[2].events
    assert not spans[None].events
    subject = {"grpo.incident": 3, "grpo.cause": "server_crash", "grpo.subject": "server-0"}
    assert [dict(one.attributes) for one in spans[1].events] == [
        subject | {"grpo.reason": "SIGKILL of pid 7"},
        subject | {"grpo.reason": "it serves again", "grpo.is_mended": True, "grpo.seconds": 16.0},
    ]


def test_a_restore_marks_what_it_undid_on_the_step_after_it(paths, sent):
    restored = event("trainer.restored", 40, global_step=3, reason="to step 3, from memory")
    trace_of(paths, line(4, 20), line(5, 30), restored, line(4, 60))
    first, _, again, _ = sent.get_finished_spans()
    assert first.attributes["rl.loop.iteration"] == again.attributes["rl.loop.iteration"] == 4
    assert events_of(again) == [("trainer.restored", 40.0)]
    assert seconds(again) == (50.0, 60.0)
    assert dict(again.events[0].attributes) == {"rl.loop.iteration": 3, "grpo.reason": "to step 3, from memory"}


@pytest.mark.parametrize(
    ("outcome", "code", "told"),
    [
        (TerminalStatus.FINISHED, StatusCode.UNSET, {"grpo.status": "FINISHED", "grpo.reason": "so it ended"}),
        (TerminalStatus.ERRORED, StatusCode.ERROR, {"grpo.status": "ERRORED", "grpo.reason": "so it ended"}),
        (TerminalStatus.ABORTED, StatusCode.UNSET, {"grpo.status": "ABORTED", "grpo.reason": "so it ended"}),
        (None, StatusCode.UNSET, {}),  # another attempt follows
    ],
)
def test_the_attempt_has_the_outcome_and_what_no_step_follows(paths, sent, outcome, code, told):
    trace_of(paths, event("incident.began", 25, **CRASH), attempt=4, outcome=outcome)
    (span,) = sent.get_finished_spans()
    assert (span.status.status_code, dict(span.attributes)) == (code, {"grpo.attempt": 4} | told)
    assert events_of(span) == [("incident.began", 25.0)]


def test_attempts_of_a_run_share_a_trace_and_runs_do_not(paths, sent):
    for run_id, attempt in (("a", 1), ("a", 2), ("b", 1)):
        paths.run_id.write_text(run_id)
        trace_of(paths, line(attempt, 20), attempt=attempt)
    ids = [span.context.trace_id for span in sent.get_finished_spans()]
    assert ids[0] == ids[1] == ids[2] == ids[3] != ids[4] == ids[5]
    assert len({span.context.span_id for span in sent.get_finished_spans()}) == 6


@pytest.mark.parametrize(
    ("told", "begins_at"),
    [
        ({"global_step": 1, "eval/sampled": 0.5}, None),
        ({"global_step": 1, "time": "soon"}, None),
        ({"global_step": 2**70, "time": T0 + 20}, None),
        ({"global_step": 1, "time": T0 + 20}, 20.0),
        (line(1, 20, took=-5.0), 20.0),
        (line(1, 20, took=float("nan")), 20.0),
        (line(1, 20, **{"rollout/reward": float("inf"), "epoch": 2**70, "policy_version": None}), 10.0),
    ],
)
def test_what_is_no_step_has_no_span_and_what_is_no_figure_no_attribute(paths, sent, told, begins_at):
    trace_of(paths, told)
    steps = [span for span in sent.get_finished_spans() if span.name == "rl.loop"]
    assert [seconds(span)[0] for span in steps] == ([] if begins_at is None else [begins_at])
    assert not any({"rl.reward.score", "grpo.epoch", "grpo.policy_version"} & span.attributes.keys() for span in steps)


class Receiver(http.server.BaseHTTPRequestHandler):
    """A collector: it keeps the path, the key and the name of each span. It answers when it may."""

    def do_POST(self):
        body = gzip.decompress(self.rfile.read(int(self.headers["Content-Length"])))
        spans = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
        self.server.heard += [(self.path, self.headers["x-key"], span.name) for span in spans]
        self.server.may_answer.wait()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.heard = []
        server.may_answer = threading.Event()
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        yield server
        server.may_answer.set()
        server.shutdown()
        serving.join()


def test_the_environment_says_where_the_collector_is(paths, collector, monkeypatch):
    collector.may_answer.set()
    monkeypatch.setattr(otel_sink, "FINISH_S", scaled(30.0))
    trace_of(paths, line(0, 20))
    assert collector.heard == [("/v1/traces", "secret", name) for name in ("rl.loop", "grpo.attempt")]


def test_a_collector_that_is_down_costs_one_sentence(paths, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")  # for the tries of one export, which are repeated after 1 s
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    said, first = [], threading.Event()
    sink = OtelSink(composed(*ON), paths, 1, say=lambda text: (said.append(text), first.set()))
    sink.log(line(0, 20))
    assert first.wait(scaled(30.0))
    sink.log(line(1, 30))
    sink.finish()
    (text,) = said
    assert text.startswith("OpenTelemetry misses spans: the collector did not take them")
    assert not logging.getLogger("opentelemetry.exporter").isEnabledFor(logging.ERROR), "it would fill driver.log"


def test_a_collector_that_never_answers_does_not_hold_the_end(paths, collector, monkeypatch):
    monkeypatch.setattr(otel_sink, "FINISH_S", 0.1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    said, before = [], {*threading.enumerate()}
    sink = OtelSink(composed(*ON), paths, 1, say=said.append)
    sink.log(line(0, 20))
    sink.finish()
    left = [thread for thread in threading.enumerate() if thread not in before and "otel" in thread.name.lower()]
    assert {thread.name for thread in left} == {"otel", "OtelBatchSpanRecordProcessor"}, "the end waited for them"
    assert all(thread.daemon for thread in left), "the process would wait for them at its exit"
    assert len(said) == 1
    assert said[0].startswith("OpenTelemetry misses spans: ")
    collector.may_answer.set()
    for thread in left:
        thread.join()


def test_what_the_sdk_refuses_switches_it_off_with_one_sentence(paths, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    said = []
    sink = OtelSink(composed(*ON), paths, 1, say=said.append)
    sink.log(line(0, 20))
    sink.follow(event("incident.began", 25, **CRASH))
    sink.end(OUTCOMES[TerminalStatus.FINISHED])
    sink.finish()
    (text,) = said
    assert text == "OpenTelemetry is off: max_queue_size must be a positive integer."


def test_off_it_opens_nothing(paths, monkeypatch):
    monkeypatch.setattr(otel_sink, "make_exporter", lambda: pytest.fail("it was opened"))
    sink = OtelSink(composed("conf=arithmetic_cpu"), paths, 1, say=pytest.fail)
    sink.log(line(0, 20))
    sink.finish()
    imports = "import sys, launcher.reporting.otel_sink; print({name.partition('.')[0] for name in sys.modules})"
    assert "'opentelemetry'" not in subprocess.check_output([sys.executable, "-c", imports], text=True)


def test_without_the_package_it_is_refused_before_anything_starts(monkeypatch):
    assert list(missing_writer(composed(*ON))) == []
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    assert list(missing_writer(composed("conf=arithmetic_cpu"))) == []
    (error,) = missing_writer(composed(*ON))
    assert str(error) == (
        "stats_logger.otel.exporter=otlp needs OpenTelemetry's exporter for HTTP, which is not installed\n"
        '  → pip install -c constraints.txt -e ".[otel]"'
    )


def test_another_exporter_is_refused():
    with pytest.raises(ConfigError) as refused:
        composed("conf=arithmetic_cpu", "stats_logger.otel.exporter=jaeger")
    assert refused.value.message.startswith("stats_logger.otel.exporter=jaeger: allowed: none, otlp (")


def test_the_screen_of_a_run_gives_it_each_event_and_step(paths, tmp_path, sent, monkeypatch):
    monkeypatch.setattr(run_screen, "write_summary", lambda paths, outcome: "")
    with (tmp_path / "screen").open("w") as out, Screen(composed(*ON), paths, out) as screen:
        screen.begin(1)
        screen.follow(event("incident.began", 5, **CRASH))
        screen.show(NOW, [line(0, 20)])
        screen.close(OUTCOMES[TerminalStatus.FINISHED])
    assert events_of(spans_of(sent)[0]) == [("incident.began", 5.0)]
    assert spans_of(sent)[None].attributes["grpo.status"] == "FINISHED"
