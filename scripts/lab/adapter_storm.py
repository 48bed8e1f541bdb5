"""Kills and stops another project's trainer at drawn steps: `python -m scripts.lab.adapter_storm areal|trl …`.

Starts `python -m launcher conf=<adapter>` with the settings that are given, sends signals to processes of its tree and
to its servers from outside, and prints for each what it cost. Where AREAL_RIG is set, `areal` is the real one on a CPU
(scripts/lab/areal_rig.py); without a script of yours, `trl` is a small model on a CPU (scripts/lab/trl_rig.py).
Exit codes: 0 FINISHED, each fault was sent, every step counts once and no process is left; 1 otherwise; 2 the command
is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence, Set
from pathlib import Path
from statistics import fmean, median

from actors.foreign.foreign_process import mark_of
from actors.processes.process_host import HOST
from actors.processes.process_tree import Process, bearing, command_line, name, process_state, send, stat_fields
from launcher.__main__ import ordered_arguments
from launcher.adapters.trainer_adapter import TrainerAdapter, adapter_of
from launcher.base.errors import UsageError
from launcher.config.compose import compose
from launcher.config.foreign import SERVERS
from launcher.reporting.run_facts import finite
from launcher.resources.foreign_plan import with_their_names
from launcher.run_files.journal import Record, number_of, read_events
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import read_run_log, written_steps
from scripts.ending import ended
from scripts.faults.started_run import Driver, started
from scripts.health.recorded_run import read_view
from scripts.lab import areal_rig, trl_rig
from scripts.lab.foreign_cost import OOM, FaultCost, begins_again, cost_of, fault_cost
from scripts.run_processes import LiveServer, find_servers

SERVER_SIGNALS = {"server": signal.SIGKILL, "server-stop": signal.SIGSTOP, "update": signal.SIGKILL}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "any": signal.SIGKILL, **SERVER_SIGNALS}
ZERO = "zero"
SERVES = frozenset({"READY"})
UPDATE_S = 0.3
"""`update` is sent at a random moment of so many seconds after the trainer has given weights."""
SURVIVED, LOST = 0, 1
LAST = 10
ENDED = (None, "Z")
LEAST_BYTES = 4096
"""The kernel takes a limit of 0 for none."""
LOOK_S = 0.1
BEHIND = "--"


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index(BEHIND) if BEHIND in given else len(given)
    return ended(lambda: _run(_parser().parse_args(given[:at]), given[at + 1 :]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.lab.adapter_storm",
        description="Kill and stop another project's trainer, and see it go on.",
    )
    parser.add_argument("adapter", choices=("areal", "trl", "command"))
    parser.add_argument("--seed", type=int, default=1, help="seed of the steps, and of the processes")
    parser.add_argument(
        "--faults",
        nargs="*",
        choices=(*SIGNALS, OOM, ZERO),
        default=["kill", "any", "stop"],
        help="of the trainer's process, of any process of its tree, or of a server of the launcher's (trainer.rung="
        "servers), which `update` kills while it loads weights; oom: the trainer gets no more memory; zero: rewards, "
        "until that is noticed (only of a run of this tool's own); nothing: a run to compare with",
    )
    parser.add_argument("--total", type=int, default=80, help="steps of a run of this tool's own")
    parser.add_argument("--output", type=Path, help="folder of a run of this tool's own, which is kept")
    parser.add_argument("--steps", nargs=2, type=int, default=(3, 40), metavar=("FIRST", "LAST"))
    parser.epilog = "Settings of the run follow behind --."
    return parser


def _run(given: argparse.Namespace, settings: Sequence[str]) -> int:
    first, last = given.steps
    if last - first < len(given.faults):
        raise UsageError(f"--steps {first} {last} has no room for {len(given.faults)} faults", "give a wider range")
    settings, broken = _made(given, settings)
    if ZERO in given.faults and broken is None:
        raise UsageError("--faults zero: the reward function is not this tool's", "use areal with AREAL_RIG, or trl")
    words = ordered_arguments([f"conf={given.adapter}", *settings])
    config = with_their_names(compose(words), [word.partition("=")[0] for word in words])
    chance, paths, adapter = random.Random(given.seed), RunPaths.of(config), adapter_of(config.trainer)
    at = sorted(chance.sample(range(first, last), len(given.faults)))
    is_served = config.trainer.rung == SERVERS
    n_servers = config.sglang.n_servers if is_served else 0
    costs: list[FaultCost] = []
    with started(words, paths) as run:
        for step, fault in zip(at, given.faults, strict=True):
            _wait(run, functools.partial(_is_due, paths, step, n_servers))
            log = adapter.source or paths.trainer_log
            begin = log.stat().st_size if log.exists() else 0
            if (moment := _strike(fault, paths, adapter, run, chance, broken)) is None:
                break
            _wait(run, functools.partial(_has_stepped, paths, moment, fault))
            costs.append(fault_cost(paths, log, begin, moment, fault))
            print(f"{fault}: {costs[-1]}", flush=True)
        exit_code = run.wait()
    standing, _ = read_run_log(paths).standing()
    steps = [line.step for line in standing]
    is_whole = steps == list(range(steps[0], steps[0] + len(steps))) if steps else False
    left = len([*bearing(mark_of(paths)), *find_servers(paths)])
    once = "each once" if is_whole else "with gaps"
    print(f"exit code {exit_code}, {len(steps)} steps, {once}, {left} processes left, {_learned(paths)}: {paths.logs}")
    were_sent = len(costs) == len(given.faults)
    return SURVIVED if exit_code == 0 and is_whole and not left and were_sent else LOST


def _made(given: argparse.Namespace, settings: Sequence[str]) -> tuple[Sequence[str], Path | None]:
    """Settings of the run, and the file that breaks its rewards; None where the run is not this tool's own. Raises
    UsageError."""
    rig, folder = areal_rig.areal_rig() if given.adapter == "areal" else None, given.output
    python = trl_rig.trl_python() if given.adapter == "trl" and trl_rig.needs_rig(settings) else None
    if rig is None and python is None:
        return settings, None
    folder = (folder or Path(tempfile.mkdtemp(prefix="adapter-storm-"))).absolute()
    if rig is not None:
        areal_rig.make_folder(rig, folder)
        os.environ.update(areal_rig.variables_of(folder, given.total))
        return areal_rig.settings_of(rig, folder, settings), folder / areal_rig.BROKEN
    assert python is not None
    folder.mkdir(parents=True, exist_ok=True)
    return trl_rig.settings_of(python, folder, given.total, settings), folder / trl_rig.BROKEN


def _learned(paths: RunPaths) -> str:
    """Of the steps that count."""
    steps, _ = read_run_log(paths).standing()
    rewards, times = finite(line.reward for line in steps), finite(line.step_s for line in steps)
    reward = f"reward {fmean(rewards[-LAST:]):.3f} in the last {LAST}" if rewards else "no rewards"
    return f"{reward}, {median(times):.2f} s a step (median)" if times else reward


def _strike(
    fault: str,
    paths: RunPaths,
    adapter: TrainerAdapter,
    run: Driver,
    chance: random.Random,
    broken: Path | None,
) -> float | None:
    """Unix seconds of the fault, of `zero` of its mend, of `oom` of the trainer's end; None where the run ended
    before."""
    if fault == ZERO:
        assert broken is not None
        broken.touch()
        first, began = _last_step(paths) + 1, time.time()
        _wait(run, lambda: any(_is_known(event, began) for event in read_events(paths.events)))
        broken.unlink(missing_ok=True)
        print(
            f"rewards at 0 in steps {first} to {_last_step(paths)}, noticed after {time.time() - began:.1f} s",
            flush=True,
        )
        return time.time() if run.poll() is None else None
    while run.poll() is None:
        if fault not in SERVER_SIGNALS:
            hit = _target(fault, paths, adapter, run, chance)
        else:
            if fault == "update":
                _wait(run, functools.partial(_is_updating, paths, _kept(paths)), look_s=0.002)
                time.sleep(chance.uniform(0, UPDATE_S))
            serving = _servers(paths, SERVES)
            hit = chance.choice(serving).http if serving else None
        what, moment = [] if hit is None else command_line(hit), time.time()
        if fault == OOM and hit is not None and _starve(hit, run):
            print(f"step {_last_step(paths)}: {fault} {hit.pid}: {' '.join(what)[:80]}", flush=True)
            return time.time()
        if fault != OOM and hit is not None and send(hit, SIGNALS[fault]):
            print(f"step {_last_step(paths)}: {fault} {hit.pid}: {' '.join(what)[:80]}", flush=True)
            return moment
        time.sleep(LOOK_S)
    return None


def _starve(hit: Process, run: Driver) -> bool:
    """It gets nothing more of what it may write to; True once it has ended."""
    with contextlib.suppress(ProcessLookupError):
        _, most = resource.prlimit(hit.pid, resource.RLIMIT_DATA)
        resource.prlimit(hit.pid, resource.RLIMIT_DATA, (LEAST_BYTES, most))
        _wait(run, lambda: process_state(hit.pid)[0] in ENDED)
    return process_state(hit.pid)[0] in ENDED


def _is_known(event: Record, moment: float) -> bool:
    """Whether the run knows of rewards at 0."""
    is_new = number_of(event.get("time")) >= moment
    return is_new and event.get("event") == "incident.began" and event.get("cause") == "reward_collapse"


def _is_due(paths: RunPaths, step: int, n_servers: int) -> bool:
    return _last_step(paths) >= step and len(_servers(paths, SERVES)) >= n_servers


def _has_stepped(paths: RunPaths, moment: float, fault: str) -> bool:
    since = begins_again(paths, moment, fault)
    return cost_of(written_steps(paths), moment, since).seconds is not None


def _is_updating(paths: RunPaths, known: Set[Path]) -> bool:
    return not _kept(paths) <= known


def _kept(paths: RunPaths) -> set[Path]:
    """Weights that the trainer has given to the door."""
    return set(paths.checkpoints.glob("kept_weights/attempt-*/v*"))


def _servers(paths: RunPaths, states: Collection[str]) -> list[LiveServer]:
    recorded = read_view(paths).servers
    return [one for one in find_servers(paths) if one.name in recorded and recorded[one.name].state in states]


def _target(fault: str, paths: RunPaths, adapter: TrainerAdapter, run: Driver, chance: random.Random) -> Process | None:
    """A process of the command's tree; None where the run ends before there is one."""
    while run.poll() is None:
        theirs = (one for one in bearing(mark_of(paths)) if name(one) != HOST)  # its host is the launcher's
        tree = sorted(theirs, key=lambda one: one.pid)
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


def _wait(run: Driver, holds: Callable[[], bool], *, look_s: float = LOOK_S) -> None:
    """Until it holds, or the run has ended."""
    while run.poll() is None and not holds():
        time.sleep(look_s)


def _last_step(paths: RunPaths) -> int:
    """Of those that count now; -1 where there is none yet."""
    steps, _ = read_run_log(paths).standing()
    return steps[-1].step if steps else -1


if __name__ == "__main__":
    sys.exit(main())
