"""OpenTelemetry as a sink of the run (`stats_logger.otel.exporter`), by its own SDK.

    trace                 the run: one id for all of its attempts
    span "grpo.attempt"   one attempt; it is sent when the attempt ends
    span "rl.loop"        one committed step, below its attempt
    event                 an incident or a restore, on the span of the first step that is committed after it

The names `rl.*` are those of a proposal, open-telemetry/semantic-conventions-genai#88; `grpo.*` are this project's.
A span is sent when it has ended. So events are on the steps: on the attempt's span, nobody would see an incident before
the end of the run, or at all after a killed driver.

A collector that is down or never answers is no reason for a run to wait or to end. So the SDK's own thread sends, and
the user gets one sentence. What the collector misses is in metrics.jsonl and events.jsonl all the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher import __version__
from launcher.base.messages import RunOutcome, TerminalStatus
from launcher.base.wording import in_one_line
from launcher.config.foreign import OWN
from launcher.config.schema import RunConfig
from launcher.run_files.run_id import read_run_id
from launcher.run_files.run_order import RESTORED
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.line_values import MOST_WHOLE, as_float, as_integer, as_unix_time
from launcher.run_log.step_line import REWARD, TIMES

SERVICE = "grpo-launcher"
FINISH_S = 5.0
"""For what is queued to be sent at the end: a collector that never answers must not hold the end of a run."""
LONGEST_TEXT = 200
OF_A_STEP: Mapping[str, str] = {
    "global_step": "rl.loop.iteration",
    REWARD: "rl.reward.score",
    f"{TIMES}step_s": "rl.loop.duration",
    f"{TIMES}rollout_s": "rl.sample.duration",
    f"{TIMES}train_s": "rl.train.duration",
    f"{TIMES}publish_s": "rl.sync.duration",
    "rollout/tokens": "grpo.rollout_tokens",
    **{key: f"grpo.{key}" for key in ("attempt", "epoch", "policy_version")},
}
"""Keys of metrics.jsonl, and the attributes that they become. The phases are no spans of their own: it is recorded how
long each took, but not when it began."""
OF_AN_INCIDENT = {
    key: f"grpo.{key}" for key in ("incident", "cause", "subject", "reason", "onset_step", "is_mended", "seconds")
}
EVENTS: Mapping[str, Mapping[str, str]] = {
    "incident.began": OF_AN_INCIDENT,
    "incident.ended": OF_AN_INCIDENT,
    RESTORED: {"global_step": "rl.loop.iteration", "reason": "grpo.reason"},  # it undid all later steps
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    name: str
    time: float
    attributes: Mapping[str, Any]


class OtelSink:
    """Takes the events and the lines of metrics.jsonl of one attempt. Never blocks and never raises; `finish` takes
    FINISH_S at most."""

    def __init__(self, config: RunConfig, paths: RunPaths, attempt: int, *, say: Callable[[str], None]) -> None:
        """`say` shows a sentence to the user, also from another thread."""
        self._say = say
        self._attempt: Any = None  # its span; None where nothing is sent (any more)
        self._waiting: list[_Event] = []  # for the next step
        self._ended = 0  # spans that are to be sent
        self._has_told = False
        if config.stats_logger.otel.exporter != "none":
            with self._guarded():
                self._begin(config, paths, attempt)

    def log(self, values: Mapping[str, object]) -> None:
        """One line of metrics. Figures of an evaluation have no time, and no span."""
        if self._attempt is not None:
            with self._guarded():
                self._add_step(values)

    def follow(self, event: Mapping[str, object]) -> None:
        """One event of the run."""
        name = str(event.get("event"))
        if self._attempt is not None and name in EVENTS:
            attributes = _attributes(event, EVENTS[name])
            self._waiting.append(_Event(name=name, time=as_unix_time(event.get("time")), attributes=attributes))

    def end(self, outcome: RunOutcome) -> None:
        """The run's own end, which an attempt that another one follows does not have."""
        if self._attempt is not None:
            with self._guarded():
                self._add_outcome(outcome)

    def finish(self) -> None:
        """Send what is queued, and the attempt's span."""
        if self._attempt is None:
            return
        with self._guarded():
            self._end(self._attempt)
            # The SDK waits for the collector up to 30 s, which no caller can change.
            closing = threading.Thread(target=self._provider.shutdown, name="otel", daemon=True)
            closing.start()
            closing.join(FINISH_S)
            if self._collector.taken < self._ended:
                self._tell_missed()
        self._attempt = None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the outer skin of a third party
            self._attempt = None
            self._say(f"OpenTelemetry is off: {in_one_line(str(error) or type(error).__name__, longest=LONGEST_TEXT)}")

    def _begin(self, config: RunConfig, paths: RunPaths, attempt: int) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.trace import set_span_in_context

        run_id = read_run_id(paths.logs)
        ids: Any = RandomIdGenerator()
        ids.generate_trace_id = lambda: _trace_id(run_id, paths)
        # Not at exit: the process would wait once more for a collector that does not answer.
        self._provider = TracerProvider(
            resource=_resource(config, paths, run_id), id_generator=ids, shutdown_on_exit=False
        )
        self._collector = _Collector(make_exporter(), self._tell_missed)
        collector: Any = self._collector  # the SDK calls `export` and `shutdown` only
        self._provider.add_span_processor(BatchSpanProcessor(collector))
        self._tracer = self._provider.get_tracer(SERVICE, __version__)
        span = self._tracer.start_span("grpo.attempt", attributes={"grpo.attempt": attempt})
        self._below = set_span_in_context(span)
        self._attempt = span

    def _add_step(self, line: Mapping[str, object]) -> None:
        end, took = as_unix_time(line.get("time")), as_float(line.get(f"{TIMES}step_s"))
        if not end or as_integer(line.get("global_step")) is None:
            return
        begin = end - took if math.isfinite(took) and took >= 0 else end
        # A step that an incident delayed begins with the incident, or the event would lie outside of its span. A
        # restore alone delays none: each attempt begins with one.
        begin = min([begin, *(one.time for one in self._waiting if one.name != RESTORED and one.time)])
        span = self._tracer.start_span(
            "rl.loop", context=self._below, start_time=_ns(begin), attributes=_attributes(line, OF_A_STEP)
        )
        self._end(span, end)

    def _add_outcome(self, outcome: RunOutcome) -> None:
        from opentelemetry.trace import Status, StatusCode

        reason = _text(outcome.reason)
        self._attempt.set_attributes({"grpo.status": str(outcome.status), "grpo.reason": reason})
        if outcome.status is TerminalStatus.ERRORED:
            self._attempt.set_status(Status(StatusCode.ERROR, reason))

    def _end(self, span: Any, time: float = 0.0) -> None:
        """With the events that wait and are not later: events are read before steps. `time` 0: now."""
        due = [one for one in self._waiting if not time or one.time <= time]
        for one in due:
            span.add_event(one.name, one.attributes, timestamp=_ns(one.time))
        self._waiting = [one for one in self._waiting if one not in due]
        self._ended += span.get_span_context().trace_flags.sampled
        span.end(_ns(time))

    def _tell_missed(self) -> None:
        if not self._has_told:
            self._has_told = True
            self._say(
                "OpenTelemetry misses spans: the collector did not take them; driver.log may have the reason. "
                "metrics.jsonl and events.jsonl have all steps and incidents"
            )


class _Collector:
    """The SDK's exporter, which counts what was taken. It is called in the SDK's thread."""

    def __init__(self, exporter: Any, missed: Callable[[], None]) -> None:
        self._exporter = exporter
        self._missed = missed
        self._log = logging.getLogger("opentelemetry")
        self.taken = 0

    def export(self, spans: Any) -> object:
        result = self._exporter.export(spans)
        is_taken = result.name == "SUCCESS"
        # Of each outage driver.log gets the first lines; else a collector that is down for days would fill it.
        self._log.setLevel(logging.NOTSET if is_taken else logging.CRITICAL)
        if is_taken:
            self.taken += len(spans)
        else:
            self._missed()
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def make_exporter() -> Any:
    """OTLP over HTTP, to where OpenTelemetry's environment variables say. A run without it imports nothing of it."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _resource(config: RunConfig, paths: RunPaths, run_id: str) -> Any:
    """What the run is. Of another project's trainer neither algorithm nor model are known."""
    from opentelemetry.sdk.resources import Resource

    attributes = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", SERVICE),  # what is given here would win over it
        "rl.run.id": run_id or paths.title,
        "grpo.experiment_name": paths.experiment_name,
        "grpo.trial_name": paths.trial_name,
    }
    if config.trainer.adapter == OWN:
        attributes |= {"rl.system": SERVICE, "rl.system.version": __version__, "rl.algorithm": "grpo"}
        attributes |= {"rl.model.name": config.actor.path}
    return Resource.create(attributes)


def _trace_id(run_id: str, paths: RunPaths) -> int:
    """Of the run, so that all of its attempts join one trace."""
    digest = hashlib.sha256(f"{run_id}/{paths.experiment_name}/{paths.trial_name}".encode()).digest()
    return int.from_bytes(digest[:16])


def _attributes(line: Mapping[str, object], names: Mapping[str, str]) -> dict[str, str | int | float]:
    """By the attributes' names. What is missing, or no text and no finite number, is left out."""
    found: dict[str, str | int | float] = {}
    for key, name in names.items():
        value = line.get(key)
        if isinstance(value, str):
            found[name] = _text(value)
        elif isinstance(value, int | float) and abs(value) < MOST_WHOLE:  # not of NaN: it compares as False
            found[name] = value
    return found


def _text(value: str) -> str:
    """As the journal writes what is no Unicode: OTLP's encoder would give up all spans beside it."""
    return in_one_line(value.encode(errors="backslashreplace").decode(), longest=LONGEST_TEXT)


def _ns(time: float) -> int | None:
    """As the SDK takes it; None is its word for now."""
    return int(time * 1e9) if time else None
