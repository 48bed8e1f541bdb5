"""Shows a run to people: the display, WandB, the resolved configuration, the closing summary."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from launcher.base.durable import replace_file
from launcher.base.messages import EvalReport, RunOutcome
from launcher.cli.ray_metrics import RayMetrics
from launcher.cli.watch_process import WatchProcess
from launcher.config.schema import RunConfig
from launcher.html_report.report_writer import ReportWriter
from launcher.reporting.closing_summary import write_summary
from launcher.reporting.current_status import CurrentStatus
from launcher.reporting.otel_sink import OtelSink
from launcher.reporting.run_gauges import gauges_of_facts, gauges_of_status
from launcher.reporting.run_panel import RunPanel
from launcher.reporting.tensorboard_sink import TensorBoardSink
from launcher.reporting.wandb_sink import WandbSink
from launcher.run_files.journal import Record
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import settings_text


class Screen:
    """One attempt as its driver sees it. Nothing that fails here ends the run."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, out: TextIO | None = None, *, began: float | None = None
    ) -> None:
        """`out`: sys.stdout by default. `began`: since when seconds count (monotonic), by default now."""
        self._config = config
        self._paths = paths
        self._panel = RunPanel(sys.stdout if out is None else out)
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
        self._panel.close()
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
        self._panel.line(text)

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
        self._panel.begin(self._paths.title, attempt, started=self._started)
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
        self._panel.show(now, steps)

    def close(self, outcome: RunOutcome) -> None:
        """The last panel stays; below it the summary, which also goes into the run's folder with the curve."""
        self._panel.close()
        if self._otel is not None:
            self._otel.end(outcome)
        for sink in self._sinks:
            sink.finish()
        if self._report is not None:
            self._report.close()
        self._panel.line(write_summary(self._paths, outcome))

    def _tell_eval(self, report: EvalReport) -> None:
        self.line(
            f"held-out accuracy at policy_version {report.policy_version}: sampled {report.sampled:.3f}, "
            f"greedy {report.greedy:.3f} ({report.prompts} prompts)"
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
