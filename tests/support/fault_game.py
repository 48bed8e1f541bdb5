"""A run made of real processes (tests/programs/fake_run.py), and the injector's command on it."""

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

from actors.processes.process_tree import Process, identify, wait_ended
from launcher.checkpoints.checkpoint_store import CheckpointName, CheckpointStore
from launcher.run_files.journal import read_lines
from scripts.faults.fault_paths import FaultPaths
from scripts.inject_fault import main
from scripts.run_processes import find_run, state
from tests.programs.fake_run import run_paths
from tests.support.machine import scaled

REPOSITORY = Path(__file__).parents[2]
deadline_s = partial(scaled, 30.0)


class FaultGame:
    """A fake run, and the injector's command on it."""

    def __init__(self, folder: Path, servers: int, step_mib: int = 0, limited_step_mib: int | None = None) -> None:
        limited_step_mib = step_mib if limited_step_mib is None else limited_step_mib
        self.paths = run_paths(folder)
        self.folder = folder
        self._run = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.programs.fake_run", str(folder)),
                *("--servers", str(servers), "--step-mib", str(step_mib)),
                *("--limited-step-mib", str(limited_step_mib)),
            ],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.driver = identify(self._run.pid)
        assert self._answer() == "up"

    def _answer(self) -> str:
        assert self._run.stdout is not None
        return self._run.stdout.readline().strip()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            assert self._run.stdin is not None
            self._run.stdin.write("\n")
            self._run.stdin.flush()
            self._answer()

    def inject(self, *words: str) -> int:
        return main([*words, "--fileroot", str(self.folder), "--within", "0.3"])

    def inject_while_it_steps(self, *words: str) -> int:
        """A step takes 0.3 s on a quiet machine, in which a hungry trainer takes its memory at least once."""
        ended = threading.Event()

        def steps() -> None:
            while not ended.wait(scaled(0.3)):
                self.step()

        stepping = threading.Thread(target=steps)
        stepping.start()
        try:
            return main([*words, "--fileroot", str(self.folder), "--within", str(scaled(20))])
        finally:
            ended.set()
            stepping.join()

    def record(self) -> list[dict]:
        return list(read_lines(FaultPaths(self.paths).record))

    def fired(self) -> dict:
        (line,) = [line for line in self.record() if line["what"] == "fired"]
        return line

    def commit_checkpoint(self, step: int) -> Path:
        name = CheckpointName(global_step=step, epoch=0, epoch_step=step)
        store = CheckpointStore(self.paths.default_checkpoints)
        with store.staging(name) as staged:
            (staged / "model.safetensors").write_bytes(os.urandom(4096))
            return store.commit(
                staged, global_step=step, policy_version=step + 1, config_fingerprint={}, health={}, keep=False
            ).path

    def end(self) -> None:
        found = [p for server in find_run(self.paths).servers for p in server.tree] if self._run.poll() is None else []
        if self._run.poll() is None:
            self._run.terminate()
        self._run.communicate(timeout=deadline_s())
        assert wait_ended(found, deadline_s())


def gone(pids: list[int]) -> bool:
    """Also a moment after the signal: a busy machine takes its time to end a process."""
    return wait_ended([process for pid in pids if (process := identify(pid)) is not None], deadline_s())


def wait_for_state(process: Process, letter: str) -> None:
    while state(process) != letter:
        assert identify(process.pid) == process
        os.sched_yield()
