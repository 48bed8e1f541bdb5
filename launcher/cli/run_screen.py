"""Shows a run to people, as its driver follows it through its files: the display, WandB and other sinks, the resolved
configuration, the closing summary."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from actors.foreign.foreign_actors import ForeignActors
from actors.supervision.run_actors import RunActors
from launcher.base.durable import replace_file
from launcher.base.messages import EvalReport, RunOutcome
from launcher.cli.deadlines import Deadlines
from launcher.cli.ray_metrics import RayMetrics
from launcher.cli.watch_process import WatchProcess
from launcher.config.schema import RunConfig
from launcher.html_report.report_writer import ReportWriter
from launcher.reporting.closing_summary import write_summary
from launcher.reporting.current_status import CurrentStatus, read_now
from launcher.reporting.event_lines import alert_of, tell
from launcher.reporting.formats import without_score
from launcher.reporting.live_display import Display, FollowedRun
from launcher.reporting.otel_sink import OtelSink
from launcher.reporting.run_gauges import gauges_of_facts, gauges_of_status
from launcher.reporting.tensorboard_sink import TensorBoardSink
from launcher.reporting.wandb_sink import WandbSink
from launcher.resources.seen_memory import SeenMemory
from launcher.run_files.journal import Journal, Record, number_of
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import settings_text

NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class Screen:
    """One attempt as its driver sees it. Nothing that fails here ends the run."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, out: TextIO | None = None, *, began: float | None = None
    ) -> None:
        """`out`: sys.stdout by default. `began`: since when seconds count (monotonic), by default now."""
        self._config = config
        self._paths = paths
        self._display = Display(sys.stdout if out is None else out)
        self._started = time.monotonic() if began is None else began
        self._wandb: WandbSink | None = None
        self._tensorboard: TensorBoardSink | None = None
        self._otel: OtelSink | None = None
        self._report: ReportWriter | None = None
        self._metrics: RayMetrics | None = None
        self._watch: WatchProcess | None = None
        self._is_attended = out is None and sys.stdout.isatty()
        self._evals: tuple[EvalReport, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Nothing is written to the screen, the report or WandB any more, and the watch page has ended."""
        self._display.close()
        if self._watch is not None:
            self._watch.close()
        if self._report is not None:
            self._report.close()
        for sink in self._sinks:
            sink.finish()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def line(self, text: str) -> None:
        """Print something once: a milestone, or what happened and what is done about it."""
        self._display.line(text)

    def milestone(self, text: str) -> None:
        """A step of the start, with the seconds since the command."""
        self.line(f"[{self.elapsed_s:5.1f} s] {text}")

    def alert(self, title: str, text: str) -> None:
        """Notify the run's owner through WandB, where it is on (alerts.wandb)."""
        if self._wandb is not None and self._config.alerts.wandb:
            self._wandb.alert(title, text)

    def follow(self, event: Record) -> None:
        """One event of the run, as it is in the journal."""
        if self._otel is not None:
            self._otel.follow(event)

    def begin(self, attempt: int) -> Path:
        """The attempt has its number: keep its settings, and open the sinks. Returns the file of the settings."""
        config = self._config
        before = read_now(self._paths)
        self._evals = () if before is None else before.evals  # a resume hears them again, and has not measured them
        self._display.begin(self._paths.title, attempt, started=self._started)
        settings = dataclasses.asdict(config)
        log_to_file(self._paths)
        written = write_config(settings, self._paths, attempt)
        self._wandb = WandbSink(config.stats_logger.wandb, self._paths, settings=settings, say=self.line)
        self._tensorboard = TensorBoardSink(config.stats_logger.tensorboard.path, self._paths, say=self.line)
        self._otel = OtelSink(config, self._paths, attempt, say=self.line)
        self._metrics = RayMetrics(config, self._paths)
        metrics = self._metrics
        self._report = ReportWriter(self._paths, heard=lambda facts: metrics.export(gauges_of_facts(facts)))
        if config.watch.port is not None:
            self._watch = WatchProcess(config.watch.port, self._paths, self.line, is_attended=self._is_attended)
        return written

    def show(self, now: CurrentStatus | None, steps: Sequence[Record]) -> None:
        """The run as it is now, None where that is as the last time. `steps`: lines of metrics.jsonl since then."""
        for line in steps:
            self._log(line)
        if now is not None and now.status is not None:
            if self._metrics is not None:
                self._metrics.export(gauges_of_status(now.status, now.servers, now.evals))
                self._metrics.list_servers(now.servers)
            for held_out in now.evals:
                if held_out not in self._evals:
                    self._tell_eval(held_out)
            self._evals = now.evals
        self._display.show(now, steps)

    def close(self, outcome: RunOutcome) -> None:
        """The last panel stays; below it the summary, which also goes into the run's folder with the curve."""
        self._display.close()
        if self._otel is not None:
            self._otel.end(outcome)
        for sink in self._sinks:
            sink.finish()
        if self._report is not None:
            self._report.close()
        self._display.line(write_summary(self._paths, outcome))

    def _tell_eval(self, report: EvalReport) -> None:
        self.line(
            f"held-out accuracy at policy_version {report.policy_version}: sampled {report.sampled:.3f}, "
            f"greedy {report.greedy:.3f} ({report.prompts} prompts{without_score(report)})"
            + "".join(f"; {name} {sampled:.3f}, {best:.3f}" for name, (sampled, best) in report.by_dataset.items())
        )
        figures: dict[str, object] = {"global_step": report.policy_version - 1}
        figures |= {"eval/sampled": report.sampled, "eval/greedy": report.greedy}
        for name, (sampled, best) in report.by_dataset.items():
            figures |= {f"eval/{name}/sampled": sampled, f"eval/{name}/greedy": best}
        self._log(figures)

    @property
    def _sinks(self) -> list[WandbSink | TensorBoardSink | OtelSink]:
        return [sink for sink in (self._wandb, self._tensorboard, self._otel) if sink is not None]

    def _log(self, line: Mapping[str, object]) -> None:
        for sink in self._sinks:
            sink.log(line)


class RunFollower:
    """Gives the screen what is new in the run's files. `actors`: None until they are created."""

    def __init__(
        self, paths: RunPaths, journal: Journal, screen: Screen, memory: SeenMemory, deadlines: Deadlines
    ) -> None:
        self._journal = journal
        self._screen = screen
        self._memory = memory
        self._deadlines = deadlines
        self._run = FollowedRun(paths, journal.attempt)
        self.actors: RunActors | ForeignActors | None = None
        self._nodes_told: set[str] = set()
        self._steps_seen = 0

    def say_lost(self, nodes: Mapping[str, str]) -> None:
        """Where nobody else has: the Coordinator was lost with its node, perhaps, and its next incarnation waits."""
        for node in nodes.keys() - self._nodes_told:
            self._nodes_told.add(node)
            facts: dict[str, Any] = {"node": node, "held": ["the Coordinator"], "cause": "node_lost"}
            self._journal.record("node.lost", subject=nodes[node], reason=f"node {node[:8]} was lost", **facts)

    def show(self, *, unwritten: Sequence[Mapping[str, object]] = ()) -> None:
        """What is new in the run's files. `unwritten`: events that the disk has not taken, as the Coordinator last had
        them."""
        assert self.actors is not None
        for event in self._run.new_events(unwritten):
            if event.get("event") == "node.lost":
                self._nodes_told.add(str(event.get("node")))
            self.actors.follow(event)
            self._deadlines.follow(event)
            self.tell(event)
        now = self._run.new_status()
        # After the status: it never counts a step whose line is not read yet.
        steps = [_with_numbers(line) for line in self._run.new_steps()]
        self._deadlines.take_steps(steps)
        self._steps_seen += len(steps)
        self._memory.look_if_due(self._steps_seen)
        self._screen.show(now, steps)

    def tell(self, event: Record) -> None:
        self._screen.follow(event)
        if line := tell(event):
            self._screen.milestone(line)
        if alert := alert_of(event):
            self._screen.alert(*alert)


def _with_numbers(line: Record) -> Record:
    """JSON has no NaN and no infinity, and WandB would draw their names as texts."""
    return {key: number_of(value) if value in NOT_FINITE else value for key, value in line.items()}


class _DriverLog(logging.FileHandler):
    """What the disk refuses is printed: a log that can't be written ends nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file can't be made
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if logging.lastResort is not None:
            logging.lastResort.handle(record)


def log_to_file(paths: RunPaths) -> None:
    """What libraries of this process log or warn of is for driver.log, not for the screen."""
    logging.captureWarnings(True)
    logging.basicConfig(
        handlers=[_DriverLog(paths.logs / "driver.log", encoding="utf-8", delay=True)],
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",  # every attempt appends to it
    )


def write_config(settings: dict[str, object], paths: RunPaths, attempt: int) -> Path:
    """config.yaml, as resolved; a later attempt with other settings gets a file of its own beside it. Returns which."""
    text, target = settings_text(settings), paths.config
    if target.exists() and target.read_text() != text:
        target = target.with_name(f"config.attempt{attempt}.yaml")
    replace_file(target, text.encode())
    return target
