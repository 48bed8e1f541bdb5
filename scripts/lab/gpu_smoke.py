"""The first quarter of an hour on a GPU: `python -m scripts.gpu_smoke`, docs/gpu.md.

Runs of a model with random weights, for which nothing is downloaded:

    disk      three steps, weights as files; then a killed server and memory that runs out; stopped, its ledger audited
    tensor    three steps in bfloat16, weights as tensors
    --large   three steps as the preset for this card has them; then a killed trainer, a hung and a killed server

Where there is no GPU the same is done on the CPU with a tiny model, and what needs a GPU is skipped by name. Parts are
cells (cells.py), with a time budget.

Exit codes: 0 every part is ok, skipped or not run for want of time; 1 a part failed; 2 wrong command, or too little
memory or disk; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from launcher.base.durable import replace_file
from launcher.base.errors import RunError, UsageError, printed_error
from launcher.base.findings import Severity
from launcher.checkpoints.model_shape import KNOWN_SHAPES
from launcher.config.compose import compose
from launcher.config.supervision import GateConfig
from launcher.resources.gpus import find_gpus
from launcher.resources.memory_estimate import GIB
from launcher.resources.node_checks import check_node
from launcher.resources.seen_memory import APART
from launcher.run_files.journal import Record, number_of, read_events, read_lines
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import written_steps
from scripts.check_ledger import audited_facts
from scripts.ending import DONE, WRONG, ended
from scripts.faults.campaign import Campaign, Rules
from scripts.faults.fault_paths import FaultPaths
from scripts.faults.schedule import parse_fault
from scripts.faults.started_run import (
    END_S,
    FIRST_STEP_S,
    Driver,
    at_s,
    committed,
    console_of,
    ended_early,
    own_words,
    started,
    until,
)
from scripts.lab.cells import (
    BROKEN,
    RUN,
    Cell,
    CellResult,
    Mark,
    Points,
    Skipped,
    Way,
    Workplace,
    about,
    begin,
    chosen,
    measure,
)
from scripts.lab.smoke_models import TINY, large_words, make_model, make_problems, small_words

SMALL, LARGE = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B"
STEPS, WITHIN_S = 3, 300.0
SHOWN_EVENTS = 40
"""After a fault: a recovery has fewer, and a run that goes on writes more without an end."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Else a small trainer on the CPU finds what its steps need in what it has freed and kept (docs/supervision.md)."""
TIMED = ("rollout_s", "train_s", "publish_s", "state_s", "checkpoint_s", "step_s")
OF_A_STEP = {name: f"timeperf/{name}" for name in TIMED} | {"logprob_distance": "grpo_actor/logprob_distance/avg"}
NEAR = Mark(measure="logprob_distance", limit=GateConfig().distance_unknown, how="worst")
FAST = Mark(measure="publish_s", limit=1.0)
AS_PLANNED = Mark(measure="apart", limit=APART)
KEPT = Mark(measure="steps_lost_or_twice", limit=0, how="sum")


def main(words: Sequence[str] | None = None) -> int:
    return ended(lambda: _run(parser().parse_args(words), list(sys.argv[1:] if words is None else words)), refused=1)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m scripts.gpu_smoke",
        description="What the first hour on a GPU must show, in one command; without a GPU on the CPU.",
        epilog=(__doc__ or "").rpartition("\n\n")[2].replace("\n", " "),
    )
    made.add_argument("--output", type=Path, default=Path("gpu_smoke"), help="new folder (default: %(default)s)")
    shapes = ", ".join(KNOWN_SHAPES)
    made.add_argument(
        "--model",
        help=f"{TINY}, or one of {shapes}: its shape, with random weights; by default {SMALL}, with --large {LARGE}, "
        f"without a GPU {TINY}",
    )
    made.add_argument("--model-folder", type=Path, help="made there, or already whole there; by default in --output")
    made.add_argument("--make-only", action="store_true", help="make the model in --model-folder, and run nothing")
    made.add_argument("--large", action="store_true", help="the preset for this card, and faults in its run")
    made.add_argument("--parts", metavar="NAME,…", help="these alone, by the names in the table")
    made.add_argument("--minutes", type=float, default=15.0, help="time budget (default: %(default)s)")
    made.add_argument(
        "--step-s",
        type=float,
        default=FIRST_STEP_S,
        metavar="S",
        help="longest wait for steps, in seconds (default: %(default)s)",
    )
    made.add_argument("overrides", nargs="*", help="settings of the runs")
    return made


def _run(given: argparse.Namespace, words: Sequence[str]) -> int:
    found = find_gpus()
    name = given.model or (TINY if found.none else LARGE if given.large else SMALL)
    if name not in (TINY, *KNOWN_SHAPES):
        raise UsageError(f"--model {name}: no such shape", f"there are {', '.join((TINY, *KNOWN_SHAPES))}")
    if given.make_only:
        if given.model_folder is None:
            raise UsageError("--make-only: where the model goes is not known", "name it with --model-folder")
        make_model(given.model_folder, name, on_the_gpu=not found.none)
        return DONE
    folder = given.output.resolve()
    model = (given.model_folder or folder / "model").resolve()
    problems = folder / "problems.jsonl"
    settings = small_words(model, no_gpu=found.none, overrides=given.overrides)
    if given.large:
        settings = large_words(model, problems, found.gpus, given.overrides)
    with contextlib.ExitStack() as stack:
        smoke = Smoke(folder, settings, found.none, stack, step_s=given.step_s)
        cells = chosen(smoke.large_cells() if given.large else smoke.cells(), given.parts, "--parts")
        budget_s = begin(given.output, given.minutes, cells)
        facts = about("gpu_smoke", words) | {"model": f"{name}, random weights", "preset": settings[0]}
        facts |= {check.subject: check.text for check in check_node()}
        try:
            if given.large:
                make_problems(problems)
            make_model(model, name)
            place = Workplace(folder=folder)
            results = measure(cells, budget_s, place, lambda made: write(folder, facts, made))
        except UsageError:
            shutil.rmtree(folder)
            raise
    print((folder / "results.md").read_text())
    return int(any(result_of(one) == "failed" for one in results))


class Smoke:
    """The parts, and what they share. `words`: settings of each run. `no_gpu`: why there is none, "" where there is
    one. `step_s`: the longest wait for steps. Runs end with `stack`."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        no_gpu: str,
        stack: contextlib.ExitStack,
        *,
        step_s: float = FIRST_STEP_S,
    ) -> None:
        self.folder = folder
        self._words = words
        self._no_gpu = no_gpu
        self._stack = stack
        self._step_s = step_s
        self._live: tuple[RunPaths, Driver] | None = None

    def cells(self) -> list[Cell]:
        """In the order in which they are run; `expected_s` is that of two quiet cores."""
        gpu, cpu = self._on_a_gpu, self._on_the_cpu
        fast = () if self._no_gpu else (FAST,)
        return [
            part("nvml", "driver and GPUs, as `python -m launcher doctor` asks", gpu(nvml), 1),
            part("disk", f"start, {STEPS} steps, weights as files", self._begin, 40, NEAR),
            part("memory", "planned against what NVML says", gpu(self._memory), 5, AS_PLANNED),
            part("server_killed", "C1: SIGKILL, until the next step", self._fault("C1:part=http"), 20),
            part("server_oom_cuda", "C9: a server starts on a full GPU", gpu(self._fault("C9", "server_device")), 90),
            part("trainer_oom_cuda", "T8: the trainer, too", gpu(self._fault("T8", "trainer_device")), 60),
            part("server_oom_host", "C3: RLIMIT_AS of a scheduler", cpu(self._fault("C3", "server_host")), 40),
            part("trainer_oom_host", "T6: RLIMIT_DATA of a step", cpu(self._fault("T6", "trainer_host")), 30),
            part("ledger", "the run is stopped, and no step is lost or taken twice", self._end, 10, KEPT),
            part("tensor", f"{STEPS} steps in bfloat16, weights as tensors", self._tensor, 40, NEAR, *fast),
        ]

    def large_cells(self) -> list[Cell]:
        return [
            part("disk", f"start, {STEPS} steps, weights as files", self._begin, 120, NEAR),
            part("memory", "planned against what NVML says", self._on_a_gpu(self._memory), 5, AS_PLANNED),
            part("trainer_killed", "T1: SIGKILL, until the next step", self._fault("T1"), 40),
            part("server_hung", "C2: SIGSTOP of its scheduler", self._fault("C2:part=scheduler"), 70),
            part("server_killed", "C1: SIGKILL", self._fault("C1:part=http"), 50),
            part("ledger", "the run is stopped, and no step is lost or taken twice", self._end, 10, KEPT),
        ]

    def _on_a_gpu(self, run: Way) -> Way:
        return skipping(f"no GPU: {self._no_gpu}") if self._no_gpu else run

    def _on_the_cpu(self, run: Way) -> Way:
        return run if self._no_gpu else skipping("this run is on a GPU, see the same on CUDA")

    def _started(self, name: str, *settings: str) -> tuple[RunPaths, Driver]:
        words = [*self._words, f"cluster.fileroot={self.folder / name}", *settings]
        paths = RunPaths.of(compose(words))
        return paths, self._stack.enter_context(started(words, paths, variables=GIVES_BACK))

    def _begin(self, place: Workplace) -> Points:
        began = time.time()
        paths, process = self._started("disk", "total_train_steps=100000")
        try:
            self._until_committed(process, paths, STEPS)
        except RunError:
            ended_by_itself = process.poll() is not None
            process.terminate()  # it must not be beside the next one
            code = process.wait(END_S)
            if code == WRONG and not paths.events.exists():  # its own pre-flight has refused it, and it wrote nothing
                what, remedy = printed_error(console_of(paths).read_text(errors="replace")) or (own_words(paths), "")
                raise UsageError(what, remedy) from None
            if ended_by_itself:
                raise ended_early(process, paths) from None
            raise
        self._live = paths, process
        starts = [one.time - began for one in written_steps(paths)[:1] if one.time]
        return {"start_s": starts, **step_points(paths)}

    def _until_committed(self, process: Driver, paths: RunPaths, count: int) -> None:
        """Raises RunError where the run ends before, no step comes, or no server lives until the first one: a third
        start would fail as the second did, and the time is better spent."""

        def look() -> bool | None:
            done = committed(paths)
            if not done and sum(event["event"] == "server.died" for event in read_events(paths.events)) > 1:
                raise RunError("the server died twice before the first step", f"see {paths.server_log(0)}")
            return done >= count or None

        until(process, look, self._step_s)

    def _running(self) -> tuple[RunPaths, Driver]:
        if self._live is None:
            raise Skipped("there is no run: see `disk`")
        return self._live

    def _memory(self, place: Workplace) -> Points:
        paths, process = self._running()
        event = until(process, lambda: first(paths, ("memory.compared", "memory.off_plan"), "", 0.0), WITHIN_S)
        planned, seen = number_of(event["planned"]), number_of(event["seen"])
        return {"planned_gib": [planned / GIB], "seen_gib": [seen / GIB], "apart": [abs(seen / planned - 1)]}

    def _fault(self, text: str, ran_out: str = "") -> Way:
        """Seconds from the fault, or from the memory that ran out of it, until its process is back, and the next
        step."""

        def run(place: Workplace) -> Points:
            paths, process = self._running()
            rules = Rules(seed=place.seed, within_s=WITHIN_S, even_the_last=True)
            Campaign(paths, rules, say=print).run([parse_fault(text)])
            *_, record = read_lines(FaultPaths(paths).record)
            if record["what"] != "fired":
                raise RunError(f"{text} was {record['what']}: {record['reason']}", f"see {FaultPaths(paths).record}")
            is_trainer = text.startswith("T")
            subject = "trainer" if is_trainer else str(record["target"])
            at = number_of(record.get("signalled_monotonic", record["began_monotonic"]))
            if ran_out:
                lost = until(process, lambda: first(paths, ("memory.ran_out",), subject, at), WITHIN_S)
                if ran_out != lost.get("ran_out", ""):
                    raise RunError(f"{subject}: {lost['ran_out']}, not {ran_out}: {lost['reason']}", "see its log")
                at = at_s(lost)
            back = ("trainer.restored", "trainer.resumed") if is_trainer else ("server.ready",)
            again = until(process, lambda: first(paths, back, subject, at), WITHIN_S)
            self._until_committed(process, paths, committed(paths) + 1)
            next_step_s = time.monotonic() - at
            print(f"{text}:", *told_after(paths, at), sep="\n")
            return {"back_s": [at_s(again) - at], "next_step_s": [next_step_s]}

        return run

    def _end(self, place: Workplace) -> Points:
        paths, process = self._running()
        process.send_signal(signal.SIGTERM)
        process.wait(END_S)
        audit = audited_facts(paths).audit
        if audit is None:
            raise RunError("there is no ledger", f"see {console_of(paths)}")
        print(*audit.doubts, sep="\n")
        return {"steps": [float(audit.steps)], "steps_lost_or_twice": [float(len(audit.doubts))]}

    def _tensor(self, place: Workplace) -> Points:
        self._running()  # where that one did not start, nor would this one: its time is another part's
        settings = ("actor.dtype=bfloat16", "actor.weight_update_mode=tensor", f"total_train_steps={STEPS}")
        paths, process = self._started("tensor", *settings)
        if process.wait(END_S):
            raise ended_early(process, paths)
        return step_points(paths)


def part(name: str, how: str, run: Way, expected_s: float, *marks: Mark) -> Cell:
    return Cell(name=name, how=how, run=run, expected_s=expected_s, marks=marks)


def told_after(paths: RunPaths, at: float) -> list[str]:
    later = [event for event in read_events(paths.events) if at_s(event) > at][:SHOWN_EVENTS]
    return [f"  {at_s(e) - at:7.1f} s  {e['event']} {e.get('subject')}: {str(e.get('reason'))[:110]}" for e in later]


def skipping(reason: str) -> Way:
    def run(place: Workplace) -> Points:
        raise Skipped(reason)

    return run


def nvml(place: Workplace) -> Points:
    if stopping := [check for check in check_node() if check.level in (Severity.BAD, Severity.GPU, Severity.SHARED)]:
        raise RunError(f"{stopping[0].subject}: {stopping[0].text}", stopping[0].hint)
    gpus = find_gpus().gpus
    return {"memory_gib": [gpu.memory / GIB for gpu in gpus], "free_gib": [gpu.free / GIB for gpu in gpus]}


def first(paths: RunPaths, names: Sequence[str], subject: str, after: float) -> Record | None:
    events = (event for event in read_events(paths.events) if event["event"] in names and at_s(event) > after)
    return next((event for event in events if subject in ("", event.get("subject"))), None)


def step_points(paths: RunPaths) -> Points:
    """As each line has them: figures that are no number are shown too, where the fold takes them for missing."""
    lines = list(read_lines(paths.metrics))
    return {name: [number_of(line[key]) for line in lines if key in line] for name, key in OF_A_STEP.items()}


# ── the table ──


def result_of(one: CellResult) -> str:
    """ok, failed, skipped or not run. A mark without a figure is not met."""
    if one.status == BROKEN or any(said.is_met is not True for said in one.verdicts):
        return "failed"
    return "ok" if one.status == RUN else one.status


def write(folder: Path, facts: dict[str, str], results: Sequence[CellResult]) -> None:
    """results.json and results.md, anew after each part."""
    parts = [
        {
            "part": one.name,
            "asked": one.how,
            "result": result_of(one),
            "reason": one.reason,
            "seconds": one.seconds,
            "load": one.load,
            "figures": one.measures,
        }
        for one in results
    ]
    replace_file(folder / "results.json", (json.dumps({**facts, "parts": parts}, indent=1) + "\n").encode())
    lines = [*(f"{key}: {value}  " for key, value in facts.items()), ""]
    lines += ["| part | asked | result | figures: median (least to most) | seconds |", "|---|---|---|---|---|"]
    lines += [f"| {one.name} | {one.how} | {result_of(one)} | {_figures(one)} | {one.seconds:.0f} |" for one in results]
    replace_file(folder / "results.md", ("\n".join(lines) + "\n").encode())


def _figures(one: CellResult) -> str:
    missed = [f"**{said.mark.measure} must be {said.mark}**" for said in one.verdicts if said.is_met is not True]
    spreads = (
        f"{name} {median(points):.3g}" + (f" ({min(points):.3g} to {max(points):.3g})" if len(points) > 1 else "")
        for name, points in one.measures.items()
        if points
    )
    return ", ".join([*filter(None, [one.reason.replace("|", "/")]), *missed, *spreads])


if __name__ == "__main__":
    sys.exit(main())
