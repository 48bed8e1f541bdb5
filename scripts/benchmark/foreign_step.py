"""Benchmark `foreign_step`: a step of the real AReaL under the launcher, with its servers, against one without it.

    plain      AReaL's trainer, and one SGLang server with the arguments that the launcher gives it: no Ray, no door
    launcher   scripts.adapter_storm areal without a fault: door, Coordinator, HealthMonitor, supervisor

Whole runs of the same YAML, in the order plain, launcher, launcher, plain, …; the times are those of AReaL's own step
lines. AREAL_RIG names a folder with AReaL on a CPU (scripts/faults/areal_rig.py). On a machine that does other work too
it tells nothing of two per cent: each run's spread is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev

from actors.serving import sglang_command
from launcher.__main__ import ordered_arguments
from launcher.adapters.trainer_adapter import adapter_of
from launcher.base.addresses import free_port
from launcher.base.errors import UsageError
from launcher.config.compose import REPOSITORY, compose
from launcher.config.schema import RunConfig
from launcher.resources.foreign_plan import with_their_names
from launcher.run_files.run_paths import RunPaths
from scripts import adapter_storm
from scripts.benchmark.measured import Measured, Points, paired_ratio
from scripts.faults import areal_rig

PLAIN, OURS = "plain", "launcher"
ONE_SERVER = ("trainer.rung=servers", "sglang.n_servers=1", "seed=1")
NO_SAVES = ("--", "saver.freq_steps=100000", "recover.freq_steps=100000")
STEP = re.compile(r"(\d{8}-\d\d:\d\d:\d\d\.\d{3}) StatsLogger INFO: .*Train step \d+/\d+ done")
STAMP = "%Y%m%d-%H:%M:%S.%f"
UNCOUNTED = 5
"""The first steps of a run, which compile and fill caches."""
STARTS_S, RUNS_S = 600.0, 3600.0
WITHOUT_KEYS = """
import actors.serving.sglang_cpu as server
keys = server.auth_middleware
keys.keys_or_exit = keys.refuse_bypasses = keys.protect = lambda *_: None
server.prepare()
server.main()
"""
"""AReaL's client sends none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=3, help="runs without the launcher, and as many under it")
    parser.add_argument("--steps", type=int, default=70, help="of each run")


def run(arguments: argparse.Namespace) -> Measured:
    """Raises UsageError."""
    rig = areal_rig.areal_rig()
    if rig is None:
        raise UsageError(f"{areal_rig.VARIABLE} is not set", "name a folder with AReaL on a CPU")
    points, notes = Points(), list[str]()
    for pair in range(arguments.pairs):
        for arm in (PLAIN, OURS) if pair % 2 == 0 else (OURS, PLAIN):
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                settings = [*ONE_SERVER, *arguments.overrides, *NO_SAVES]
                log = (_plain if arm == PLAIN else _ours)(rig, Path(folder) / "run", arguments.steps, settings)
                times = step_times(log.read_text(errors="replace"))
            points.setdefault(f"{arm}_step_s", []).append(fmean(times))
            load = f"load {os.getloadavg()[0]:.1f}"
            notes.append(f"{arm}: {len(times)} steps, {fmean(times):.3f} s, deviation {stdev(times):.3f}, {load}")
            print(notes[-1], file=sys.stderr, flush=True)
    ratio = paired_ratio(points[f"{OURS}_step_s"], points[f"{PLAIN}_step_s"])
    return Measured(points=points, ratios={f"{OURS} over {PLAIN}": ratio}, notes=notes)


def step_times(log: str) -> list[float]:
    """Seconds of each step but the first few. Raises RuntimeError where there are too few."""
    stamps = [datetime.strptime(found[1], STAMP).replace(tzinfo=UTC).timestamp() for found in STEP.finditer(log)]
    times = [later - earlier for earlier, later in itertools.pairwise(stamps)][UNCOUNTED:]
    if len(times) < 2:
        raise RuntimeError(f"{len(stamps)} steps were taken: {log[-1000:]}")
    return times


def _ours(rig: Path, folder: Path, steps: int, settings: Sequence[str]) -> Path:
    words = ("areal", "--faults", "--total", str(steps), "--output", str(folder), "--", *settings)
    with contextlib.redirect_stdout(sys.stderr):
        if adapter_storm.main(words) != adapter_storm.SURVIVED:
            raise RuntimeError(f"the run below {folder} did not finish")
    return RunPaths.of(_config(rig, folder, steps, settings)).trainer_log


def _config(rig: Path, folder: Path, steps: int, settings: Sequence[str]) -> RunConfig:
    os.environ.update(areal_rig.variables_of(folder, steps))
    words = ordered_arguments(["conf=areal", *areal_rig.settings_of(rig, folder, settings)])
    return with_their_names(compose(words), [word.partition("=")[0] for word in words])


def _plain(rig: Path, folder: Path, steps: int, settings: Sequence[str]) -> Path:
    areal_rig.make_folder(rig, folder)
    config, log = _config(rig, folder, steps, settings), folder / "trainer.log"
    command = adapter_of(config.trainer).command(None)
    with _server(config, folder) as address, log.open("w") as output:
        environment = os.environ | command.variables | {str(config.trainer.addresses_env): address}
        with subprocess.Popen(
            command.words, env=environment, cwd=command.cwd, stdout=output, stderr=output, start_new_session=True
        ) as trainer:
            try:
                trainer.wait(timeout=RUNS_S)
            finally:
                _end(trainer)
    return log


@contextlib.contextmanager
def _server(config: RunConfig, folder: Path) -> Iterator[str]:
    """Its `host:port`, once it answers."""
    port, scratch, model = free_port("127.0.0.1"), folder / "scratch", str(config.actor.path)
    scratch.mkdir()
    words = sglang_command.command(
        config.sglang,
        entry=(sys.executable, "-c", WITHOUT_KEYS),
        device="cpu",
        index=0,
        generation=0,
        model_path=model,
        weight_version=0,
        port=port,
    )
    environment = sglang_command.environment(
        config.sglang, os.environ, device="cpu", gpu_ids=(), scratch=scratch, model_path=model
    )
    with (folder / "server.log").open("w") as output:
        server = subprocess.Popen(
            words, env=environment, cwd=REPOSITORY, stdout=output, stderr=output, start_new_session=True
        )
    try:
        give_up_at = time.monotonic() + STARTS_S
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if server.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"the server did not start: {(folder / 'server.log').read_text()[-1000:]}")
            time.sleep(0.5)
        yield f"127.0.0.1:{port}"
    finally:
        _end(server)


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5.0) as answer:
        return bool(answer.status == 200)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
