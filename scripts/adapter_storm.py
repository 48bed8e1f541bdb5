"""Kills and stops another project's trainer at steps drawn from a seed: `python -m scripts.adapter_storm areal|trl …`.

Starts `python -m launcher conf=<adapter>` with the settings that are given, sends signals to processes of its tree from
outside, and prints for each what it cost. Exit codes: 0 FINISHED, each fault was sent and every step counts once; 1
otherwise; 2 the command is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from actors.foreign.foreign_process import mark_of
from actors.processes.process_tree import Process, bearing, command_line, send, stat_fields
from launcher.__main__ import ordered_arguments
from launcher.adapters.trainer_adapter import TrainerAdapter, adapter_of
from launcher.base.errors import UsageError
from launcher.config.compose import compose
from launcher.resources.foreign_plan import with_their_names
from launcher.run_files.journal import Record, current_lines, number_of, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.ending import ended
from scripts.storm import started

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "any": signal.SIGKILL}
SURVIVED, LOST = 0, 1
LOOK_S = 0.1
BEHIND = "--"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of a fault: seconds to the first step that was new, None where none came; and steps that were taken again."""

    after_step: int
    seconds: float | None
    steps_again: int


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index(BEHIND) if BEHIND in given else len(given)
    return ended(lambda: _run(_parser().parse_args(given[:at]), given[at + 1 :]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.adapter_storm", description="Kill and stop another project's trainer, and see it go on."
    )
    parser.add_argument("adapter", choices=("areal", "trl", "command"))
    parser.add_argument("--seed", type=int, default=1, help="seed of the steps, and of the processes")
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=SIGNALS,
        default=["kill", "any", "stop"],
        help="of the trainer's process, or of any process of its tree",
    )
    parser.add_argument("--steps", nargs=2, type=int, default=(3, 40), metavar=("FIRST", "LAST"))
    parser.epilog = "Settings of the run follow behind --."
    return parser


def _run(given: argparse.Namespace, settings: Sequence[str]) -> int:
    words = ordered_arguments([f"conf={given.adapter}", *settings])
    config = with_their_names(compose(words), [word.partition("=")[0] for word in words])
    chance, paths, adapter = random.Random(given.seed), RunPaths.of(config), adapter_of(config.trainer)
    first, last = given.steps
    if last - first < len(given.faults):
        raise UsageError(f"--steps {first} {last} has no room for {len(given.faults)} faults", "give a wider range")
    at = sorted(chance.sample(range(first, last), len(given.faults)))
    sent: list[tuple[str, float]] = []
    with started(words, paths) as run:
        for step, fault in zip(at, given.faults, strict=True):
            while run.poll() is None and _last_step(paths) < step:
                time.sleep(LOOK_S)
            if (target := _target(fault, paths, adapter, run, chance)) is None:
                break
            print(f"step {_last_step(paths)}: {fault} {target.pid}: {' '.join(command_line(target))[:80]}", flush=True)
            if send(target, SIGNALS[fault]):
                sent.append((fault, time.time()))
            _wait_new(paths, run, after=_last_step(paths))
        exit_code = run.wait()
    lines = list(read_lines(paths.metrics))
    for fault, moment in sent:
        print(f"{fault}: {cost_of(lines, moment)}")
    steps = [number_of(line.get("global_step")) for line in current_lines(lines)]
    is_whole = steps == list(range(int(steps[0]), int(steps[0]) + len(steps))) if steps else False
    print(f"exit code {exit_code}, {len(steps)} steps, {'each once' if is_whole else 'with gaps'}: {paths.logs}")
    return SURVIVED if exit_code == 0 and is_whole and len(sent) == len(given.faults) else LOST


def cost_of(lines: Sequence[Record], at: float) -> Cost:
    """`lines`: all of metrics.jsonl. `at`: unix seconds of the fault."""
    seen = [(number_of(line.get("time")), int(number_of(line.get("global_step")))) for line in lines]
    last = max((step for moment, step in seen if moment < at), default=-1)
    new = next((moment for moment, step in seen if moment >= at and step > last), None)
    again = sum(at <= moment and step <= last for moment, step in seen if new is None or moment < new)
    return Cost(after_step=last, seconds=None if new is None else round(new - at, 1), steps_again=again)


def _target(
    fault: str, paths: RunPaths, adapter: TrainerAdapter, run: subprocess.Popen[bytes], chance: random.Random
) -> Process | None:
    """A process of the command's tree; None where the run ends before there is one."""
    while run.poll() is None:
        tree = sorted(bearing(mark_of(paths)), key=lambda one: one.pid)
        alike = {one.pid for one in tree if adapter.is_trainer(command_line(one))}
        within = alike or {one.pid for one in tree}
        first = [one for one in tree if one.pid in within and _parent(one) not in within]
        if fault == "any" and tree:
            return chance.choice(tree)
        if first and (alike or fault != "any"):
            return first[0]
        time.sleep(LOOK_S)
    return None


def _parent(process: Process) -> int:
    fields = stat_fields(process.pid)
    return 0 if fields is None else int(fields[1])


def _wait_new(paths: RunPaths, run: subprocess.Popen[bytes], *, after: int) -> None:
    while run.poll() is None and _last_step(paths) <= after:
        time.sleep(LOOK_S)


def _last_step(paths: RunPaths) -> int:
    """Of those that count now; -1 where there is none yet."""
    with contextlib.suppress(OSError):
        if lines := current_lines(read_lines(paths.metrics)):
            return int(number_of(lines[-1].get("global_step")))
    return -1


if __name__ == "__main__":
    sys.exit(main())
