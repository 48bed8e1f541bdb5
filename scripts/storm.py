"""Starts a run, injects faults at steps drawn from a seed, and reports how it recovered: `python -m scripts.storm`.

The faults come from outside (docs/supervision.md). When the run has ended, the tool reports for each fault when it was
detected and when the run had recovered, and for the run whether its ledger is consistent. Exit codes:
0 FINISHED and nothing lost, doubled or stale in its ledger, which has what servers said of their weights, and all of
that is known; 1 otherwise; 2 the command is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

from launcher.base.errors import RunError
from launcher.config.compose import compose
from launcher.config.schema import RunConfig
from launcher.reporting.ledger_audit import Audit
from launcher.reporting.run_facts import finite
from launcher.run_files.journal import Record, read_events, read_lines
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import written_steps
from launcher.run_log.step_line import StepLine
from scripts.check_ledger import audited_facts
from scripts.checkpoints.arguments import Parser
from scripts.ending import ended
from scripts.faults.broken_reward import FUNCTION, SOLVE
from scripts.faults.campaign import Campaign, Rules
from scripts.faults.fault_paths import FaultPaths
from scripts.faults.outcome import FaultOutcome, outcomes, role_of
from scripts.faults.schedule import ScheduledFault, storm
from scripts.faults.started_run import END_S, started, until_committed

EVERYTHING = "C1x3 C2x2 C7 T1x2 M1x2 C5 T3"
EPOCHS_END = ("train_dataset.max_items=160", "total_train_epochs=1000", "saver.freq_epochs=null")
"""12 epochs in 120 steps: that a prompt is lost shows where an epoch ends. A checkpoint at the end of each would repair
what cells without checkpoints (scripts/lab/fault_bench.py) are to lose."""
AGENT = "actors.reward.calculator:solve"
SETTLE = 0.9
"""The last fault comes before so much of the run is over, so that it is got over within it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a storm left. `reward`: mean of the last ten valid steps."""

    seed: int
    exit_code: int
    asked: int
    outcomes: Sequence[FaultOutcome]
    audit: Audit
    reward: float
    held_out: float | None
    seconds: float

    @property
    def survived(self) -> bool:
        return self.exit_code == 0 and not self.audit.doubts and len(self.outcomes) == self.asked


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _run(_parser().parse_args(arguments)), refused=1)


def _run(given: argparse.Namespace) -> int:
    fileroot = given.fileroot or Path(tempfile.mkdtemp(prefix="storm-"))
    words = storm_words(fileroot.resolve(), conf=given.conf, overrides=given.overrides)
    result = run_under_faults(words, given.faults, seed=given.seed)
    print(table(result))
    if given.json is not None:
        given.json.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    return 0 if result.survived else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser("storm", "Start a run, inject faults, and report how it recovered.")
    parser.add_argument("--faults", default=EVERYTHING, metavar="'KIND[xN] …'", help=f"default: {EVERYTHING}")
    parser.add_argument("--seed", type=int, default=1, help="seed for the steps, the targets and the moments")
    parser.add_argument("--fileroot", type=Path, help="folder that the run writes to; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the result into this file")
    parser.add_argument("--conf", default="arithmetic_cpu", help="preset of the experiment")
    parser.add_argument("overrides", nargs="*", help="settings, added after the storm's own")
    return parser


def storm_words(fileroot: Path, *, conf: str = "arithmetic_cpu", overrides: Sequence[str] = ()) -> list[str]:
    """The settings of a run that faults can be injected into."""
    words = [f"conf={conf}", f"cluster.fileroot={fileroot}", f"reward.fn={FUNCTION}", "sglang.n_servers=2"]
    words += [*EPOCHS_END, *overrides]
    return [*words, f"rollout.episode={SOLVE}"] if compose(words).rollout.episode == AGENT else words


def drawn(text: str, config: RunConfig, *, seed: int) -> tuple[ScheduledFault, ...]:
    """The faults of a storm over such a run, each at its step. Raises UsageError."""
    last = int(SETTLE * (config.total_train_steps or 0)) - 1
    return storm(text, first_step=2, last_step=last, seed=seed)


def run_under_faults(words: Sequence[str], text: str, *, seed: int) -> Result:
    """Run it, break it, read what it wrote. Raises UsageError, and RunError where it never took a step."""
    config = compose(words)
    paths = RunPaths.of(config)
    faults = drawn(text, config, seed=seed)
    began = time.monotonic()
    with started(words, paths) as process:
        until_committed(process, paths, 1)
        rules = Rules(seed=seed, within_s=300.0)
        Campaign(paths, rules, say=lambda line: print(line, flush=True)).run(faults)
        exit_code = process.wait(END_S)
    return read_result(paths, seed=seed, asked=len(faults), exit_code=exit_code, seconds=time.monotonic() - began)


def read_result(paths: RunPaths, *, seed: int, asked: int, exit_code: int, seconds: float) -> Result:
    record, events = list(read_lines(FaultPaths(paths).record)), list(read_events(paths.events))
    facts = audited_facts(paths)
    if facts.audit is None:
        raise RunError("the run has no ledger", f"see {paths.fileroot}/console.log")
    rewards = finite(line.reward for line in facts.steps[-10:])
    return Result(
        seed=seed,
        exit_code=exit_code,
        asked=asked,
        outcomes=outcomes(record, events, _commits(written_steps(paths), events)),
        audit=facts.audit,
        reward=fmean(rewards) if rewards else float("nan"),
        held_out=facts.evals[-1].sampled if facts.evals else None,
        seconds=seconds,
    )


def _commits(steps: Sequence[StepLine], events: Sequence[Record]) -> list[tuple[float, int]]:
    """Steps have unix time only; the monotonic clock is taken from the events, which have both."""
    apart = [
        unix - monotonic
        for event in events
        if isinstance(unix := event.get("time"), float) and isinstance(monotonic := event.get("monotonic"), float)
    ]
    offset = median(apart) if apart else 0.0
    return [(line.time - offset, line.step) for line in steps if line.time]


def table(result: Result) -> str:
    rows = [
        f"| {o.kind} | {o.target} | {'' if o.step is None else o.step} | {_s(o.noticed_s)} {o.noticed_by} "
        f"| {_s(o.serves_s)} | {_s(o.next_step_s)} | {o.taken_back} |"
        for o in result.outcomes
    ]
    held_out = "" if result.held_out is None else f", held-out {result.held_out:.3f}"
    sound = "FINISHED, nothing lost, doubled or stale in its ledger"
    verdict = sound if result.survived else f"NOT SURVIVED (exit code {result.exit_code})"
    found = result.audit
    return "\n".join(
        [
            "",
            "| fault | target | after step | noticed | serves again | next step | steps undone |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"{verdict}: seed {result.seed}, {len(result.outcomes)} of {result.asked} faults fired, "
            f"{result.seconds:.0f} s, reward {result.reward:.3f}{held_out}",
            f"ledger: {found.counts}; {found.taken_back} undone, "
            f"{found.stale_steps} steps on stale tokens, log-probs at most {found.largest_distance:.1g} apart",
            *(f"  {doubt}" for doubt in found.doubts),
            *_unnoticed(result.outcomes),
            *_medians(result.outcomes),
        ]
    )


def _unnoticed(of: Sequence[FaultOutcome]) -> Iterator[str]:
    """Old weights under a new label may be replaced before anybody compares log-probs: the ledger has the label."""
    for one in of:
        if one.noticed_s is None:
            where = "before the first step" if one.step is None else f"after step {one.step}"
            yield f"not noticed: {one.kind} of {one.target} {where}; what it did to the run is not known"


def _medians(of: Sequence[FaultOutcome]) -> Iterator[str]:
    """The promised figures, over all faults that have one."""
    killed = [o for o in of if o.kind in {"C1", "C7", "T1"}]
    for what, seconds in {
        "a kill in the journal": [o.died_s for o in killed],
        "a hang noticed": [o.noticed_s for o in of if o.kind in {"C2", "T2"}],
        "a server serves again": [o.serves_s for o in of if role_of(o.kind) == "server"],
        "the next step": [o.next_step_s for o in of],
    }.items():
        known = [s for s in seconds if s is not None]
        if known:
            yield f"{what}: median {_s(median(known))}, at most {_s(max(known))} ({len(known)} of {len(seconds)})"


def _s(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
