"""The first quarter of an hour on a GPU: `python -m scripts.gpu_smoke`, docs/gpu.md.

Two runs of a model with random weights, for which nothing is downloaded, and two of scripts.lab.benchmark:

    disk      three steps, weights as files; then a killed server and memory that runs out; stopped, its ledger audited
    tensor    three steps in bfloat16, weights as tensors
    publish, state   the benchmarks of these names on the same model

Where there is no GPU the same is done on the CPU with a tiny model, and what needs a GPU is skipped by name. Parts are
cells of scripts.lab.fault_bench, with its time budget.

Exit codes: 0 every part is ok, skipped or not run for want of time; 1 a part failed; 2 wrong command, or too little
memory or disk; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from launcher.base.durable import replace_file
from launcher.base.errors import ResourceError, RunError, UsageError, printed_error
from launcher.checkpoints.model_shape import KNOWN_SHAPES
from launcher.config.compose import compose
from launcher.config.supervision import GateConfig
from launcher.resources.gpu_checks import Stops
from launcher.resources.gpus import find_gpus
from launcher.resources.memory_estimate import GIB
from launcher.resources.node_checks import check_node
from launcher.resources.seen_memory import APART
from launcher.run_files.journal import Record, number_of, read_events, read_lines
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import written_steps
from scripts.check_ledger import audited_facts
from scripts.ending import WRONG, ended
from scripts.faults.campaign import Campaign, Rules
from scripts.faults.fault_paths import FaultPaths
from scripts.faults.schedule import parse_fault
from scripts.faults.started_run import (
    END_S,
    PRESET,
    Driver,
    at_s,
    committed,
    console_of,
    ended_early,
    own_words,
    started,
    until,
    until_committed,
)
from scripts.lab.benchmark.measured import Points
from scripts.lab.fault_bench.__main__ import about, begin, measure, run_cell
from scripts.lab.fault_bench.cells import Cell
from scripts.lab.fault_bench.runs import Way, Workplace
from scripts.lab.fault_bench.verdicts import BROKEN, RUN, CellResult, Mark, Skipped

TINY, SMALL = "tiny", "Qwen/Qwen2.5-0.5B"
STEPS, WITHIN_S = 3, 300.0
SAME = (
    *("experiment_name=gpu_smoke", "reward.fn=scripts.faults.broken_reward:of_token_ids"),
    *("gate.canaries=0", "gate.recorded=0", "gate.max_reward_jump=null", "gate.max_share_jump=null"),
    *("reward_health.zero_breaker_steps=null", "reward_health.fall_threshold=null"),
    *("evaluator.freq_steps=null", "valid_dataset.max_items=8", "saver.freq_epochs=null", "recover.freq_steps=20"),
    *("total_train_epochs=10000", "actor.mb_spec.max_tokens_per_mb=16384"),
)
"""Random weights learn nothing: rewards are drawn, and what judges them is off."""
ON_A_GPU = (
    *("sglang.device=cuda", "actor.device=cuda", "actor.dtype=bfloat16"),
    *("sglang.gpu_fraction=0.5", "actor.gpu_fraction=0.5", "sglang.mem_fraction_static=0.2"),
    *("sglang.max_total_tokens=null", "sglang.context_length=2048", "gconfig.max_new_tokens=256"),
    *("actor.gradient_checkpointing=true", "rollout.setup_timeout=600", "health.silence_s=15", "health.proof_s=45"),
)
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Else a small trainer on the CPU finds what its steps need in what it has freed and kept (docs/supervision.md)."""
KEYS = {
    "hidden": "hidden_size", "intermediate": "intermediate_size", "layers": "num_hidden_layers", "vocab": "vocab_size",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "tied": "tie_word_embeddings",
    "positions": "max_position_embeddings",
}  # fmt: skip
"""Of config.json, by the field of a shape."""
TIMED = ("rollout_s", "train_s", "publish_s", "state_s", "checkpoint_s", "step_s")
OF_A_STEP = {name: f"timeperf/{name}" for name in TIMED} | {"logprob_distance": "grpo_actor/logprob_distance/avg"}
NEAR = Mark(measure="logprob_distance", limit=GateConfig().distance_unknown, how="worst")
KEPT = (Mark(measure="steps_lost_or_twice", limit=0, how="sum"),)


def main(words: Sequence[str] | None = None) -> int:
    return ended(lambda: _run(parser().parse_args(words), list(sys.argv[1:] if words is None else words)), refused=1)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m scripts.gpu_smoke",
        description="What the first hour on a GPU must show, in one command; without a GPU on the CPU.",
        epilog=(__doc__ or "").rpartition("\n\n")[2].replace("\n", " "),
    )
    made.add_argument("--output", type=Path, default=Path("gpu_smoke"), help="new folder (default: %(default)s)")
    made.add_argument("--model", help=f"{TINY}, or one of {', '.join(KNOWN_SHAPES)}: its shape, with random weights; "
                      f"by default {SMALL}, without a GPU {TINY}")  # fmt: skip
    made.add_argument("--minutes", type=float, default=15.0, help="time budget (default: %(default)s)")
    made.add_argument("overrides", nargs="*", help="settings of the runs and the benchmarks")
    return made


def _run(given: argparse.Namespace, words: Sequence[str]) -> int:
    no_gpu = find_gpus().none
    name = given.model or (TINY if no_gpu else SMALL)
    if name not in (TINY, *KNOWN_SHAPES):
        raise UsageError(f"--model {name}: no such shape", f"there are {', '.join((TINY, *KNOWN_SHAPES))}")
    with contextlib.ExitStack() as stack:
        smoke = Smoke(given.output.resolve(), given.overrides, no_gpu, stack)
        cells = smoke.cells()
        budget_s = begin(given.output, given.minutes, cells)
        facts = about("gpu_smoke", words) | {"model": f"{name}, random weights"}
        facts |= {check.name: check.seen for check in check_node()}
        place = Workplace(folder=smoke.folder, seed=1, overrides=(), usual_s=None)
        try:
            make_model(smoke.model, name)
            results = measure(
                cells, budget_s, lambda cell, _: run_cell(cell, place), lambda found: write(smoke.folder, facts, found)
            )
        except UsageError:
            shutil.rmtree(smoke.folder)
            raise
    print((smoke.folder / "results.md").read_text())
    return int(any(result_of(one) == "failed" for one in results))


def make_model(folder: Path, name: str) -> None:
    """A folder with random weights and the preset's tokenizer, which has a word for each further id that the shape has.
    Raises ResourceError where there is no room for it."""
    own, changes = Path(compose([PRESET]).actor.path), {}
    if name != TINY:
        shape = KNOWN_SHAPES[name]
        room, needed = shutil.disk_usage(folder.parent).free, 4 * shape.parameters
        if room < needed:
            said = f"{folder} needs {needed / GIB:.1f} GiB, {room / GIB:.1f} GiB are free"
            raise ResourceError(said, "make room, or name another --output")
        changes = {key: getattr(shape, field) for field, key in KEYS.items()}
    from scripts.lab.benchmark.state import make_model as random_model  # brings torch

    random_model(folder, **changes)
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy2(own / file, folder)
    tokenizer = json.loads((own / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words |= {added["content"]: added["id"] for added in tokenizer["added_tokens"]}  # or they get ids after all others
    words |= {f"<{number}>": number for number in range(len(words), changes.get("vocab_size", 0))}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


class Smoke:
    """The parts, and what they share. `no_gpu`: why there is none, "" where there is one. Runs end with `stack`."""

    def __init__(self, folder: Path, overrides: Sequence[str], no_gpu: str, stack: contextlib.ExitStack) -> None:
        self.folder, self.model = folder, folder / "model"
        self._no_gpu = no_gpu
        self._stack = stack
        self._words = (*SAME, *(() if no_gpu else ON_A_GPU), f"actor.path={self.model}", *overrides)
        self._live: tuple[RunPaths, Driver] | None = None

    def cells(self) -> list[Cell]:
        """In the order in which they are run; `expected_s` is that of two quiet cores."""

        def part(name: str, how: str, run: Way, expected_s: float, *marks: Mark) -> Cell:
            return Cell(name=name, arm="", how=how, run=run, expected_s=expected_s, marks=marks)

        def gpu(run: Way) -> Way:
            return skipping(f"no GPU: {self._no_gpu}") if self._no_gpu else run

        def cpu(run: Way) -> Way:
            return run if self._no_gpu else skipping("this run is on a GPU, see the same on CUDA")

        few = ("--millions", "1", "--times", "3", "--step-s", "1", f"tokenizer_path={self.model}")
        fast = () if self._no_gpu else (Mark(measure="tensor_s", limit=1.0),)
        return [
            part("nvml", "driver and GPUs, as `python -m launcher doctor` asks", gpu(nvml), 1),
            part("disk", f"start, {STEPS} steps, weights as files", self._begin, 40, NEAR),
            part("memory", "planned against what NVML says", gpu(self._memory), 5, Mark(measure="apart", limit=APART)),
            part("server_killed", "C1: SIGKILL, until the next step", self._fault("C1:part=http"), 20),
            part("server_oom_cuda", "C9: a server starts on a full GPU", gpu(self._fault("C9", "server_device")), 90),
            part("trainer_oom_cuda", "T8: the trainer, too", gpu(self._fault("T8", "trainer_device")), 60),
            part("server_oom_host", "C3: RLIMIT_AS of a scheduler", cpu(self._fault("C3", "server_host")), 40),
            part("trainer_oom_host", "T6: RLIMIT_DATA of a step", cpu(self._fault("T6", "trainer_host")), 30),
            part("ledger", "the run is stopped, and no step is lost or taken twice", self._end, 10, *KEPT),
            part("tensor", f"{STEPS} steps in bfloat16, weights as tensors", self._tensor, 40, NEAR),
            part("publish", "scripts.lab.benchmark publish", self._benchmark("publish", "--publishes", "5"), 30, *fast),
            part("state", "scripts.lab.benchmark state", self._benchmark("state", *few), 15),
        ]

    def _started(self, name: str, *settings: str) -> tuple[RunPaths, Driver]:
        words = [PRESET, *self._words, f"cluster.fileroot={self.folder / name}", *settings]
        paths = RunPaths.of(compose(words))
        return paths, self._stack.enter_context(started(words, paths, variables=GIVES_BACK))

    def _begin(self, place: Workplace) -> Points:
        began = time.time()
        paths, process = self._started("disk", "total_train_steps=100000")
        try:
            until_committed(process, paths, STEPS)
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
        def run(place: Workplace) -> Points:
            paths, process = self._running()
            rules = Rules(seed=place.seed, within_s=WITHIN_S, even_the_last=True)
            Campaign(paths, rules, say=print).run([parse_fault(text)])
            *_, record = read_lines(FaultPaths(paths).record)
            if record["what"] != "fired":
                raise RunError(f"{text} was {record['what']}: {record['reason']}", f"see {FaultPaths(paths).record}")
            subject = "trainer" if text.startswith("T") else str(record["target"])
            at = number_of(record.get("signalled_monotonic", record["began_monotonic"]))
            end = ("memory.ran_out" if ran_out else "server.died",)
            lost = until(process, lambda: first(paths, end, subject, at), WITHIN_S)
            if ran_out != lost.get("ran_out", ""):
                raise RunError(f"{subject}: {lost['ran_out']}, not {ran_out}: {lost['reason']}", "see its log")
            back = ("trainer.restored" if subject == "trainer" else "server.ready",)
            again = until(process, lambda: first(paths, back, subject, at_s(lost)), WITHIN_S)
            until_committed(process, paths, committed(paths) + 1)
            return {"back_s": [at_s(again) - at_s(lost)], "next_step_s": [time.monotonic() - at_s(lost)]}

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
        settings = ("actor.dtype=bfloat16", "actor.weight_update_mode=tensor", f"total_train_steps={STEPS}")
        paths, process = self._started("tensor", *settings)
        if process.wait(END_S):
            raise ended_early(process, paths)
        return step_points(paths)

    def _benchmark(self, name: str, *words: str) -> Way:
        """Its seconds. In a process of its own, since what it holds of a GPU ends with that alone."""

        def run(place: Workplace) -> Points:
            file = self.folder / f"{name}.json"
            command = [sys.executable, "-m", "scripts.lab.benchmark", name, "--json", str(file), *words, *self._words]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=END_S, check=False)
            if done.returncode:
                raise RunError(f"{name} ended with {done.returncode}: {done.stderr.strip()[-300:]}", "see above")
            points: Points = json.loads(file.read_text())["points"]
            return points

        return run


def skipping(reason: str) -> Way:
    def run(place: Workplace) -> Points:
        raise Skipped(reason)

    return run


def nvml(place: Workplace) -> Points:
    if stopping := [check for check in check_node() if check.stops in (Stops.EVERY, Stops.GPU, Stops.SHARED)]:
        raise RunError(f"{stopping[0].name}: {stopping[0].seen}", stopping[0].remedy)
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
        {"part": one.name, "asked": one.how, "result": result_of(one), "reason": one.reason,
         "seconds": one.seconds, "load": one.load, "figures": one.measures} for one in results
    ]  # fmt: skip
    replace_file(folder / "results.json", (json.dumps({**facts, "parts": parts}, indent=1) + "\n").encode())
    lines = [*(f"{key}: {value}  " for key, value in facts.items()), ""]
    lines += ["| part | asked | result | figures: median (least to most) | seconds |", "|---|---|---|---|---|"]
    lines += [f"| {one.name} | {one.how} | {result_of(one)} | {_figures(one)} | {one.seconds:.0f} |" for one in results]
    replace_file(folder / "results.md", ("\n".join(lines) + "\n").encode())


def _figures(one: CellResult) -> str:
    missed = [f"**{said.mark.measure} must be {said.mark}**" for said in one.verdicts if said.is_met is not True]
    spreads = (
        f"{name} {median(points):.3g}" + (f" ({min(points):.3g} to {max(points):.3g})" if len(points) > 1 else "")
        for name, points in one.measures.items() if points
    )  # fmt: skip
    return ", ".join([*filter(None, [one.reason.replace("|", "/")]), *missed, *spreads])


if __name__ == "__main__":
    sys.exit(main())
