"""The test's side of a run whose trainer is a command: start it, look at its events, kill what belongs to it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from actors.foreign.foreign_process import mark_of
from actors.processes.process_tree import bearing
from launcher.run_files.journal import current_lines, read_lines
from launcher.run_files.run_paths import RunPaths, login_name
from tests.support.machine import scaled

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "programs" / "foreign_trainer.py"
DEADLINE_S = 240


class ForeignRun:
    """`settings` come after those that every run here has. Ended with the test, by pid."""

    deadline_s = DEADLINE_S

    def __init__(self, folder: Path, command: str, *settings: str, name: str = "foreign", conf: str = "command"):
        self.folder = folder
        self.paths = RunPaths(fileroot=folder / "runs", user=login_name(), experiment_name="tried", trial_name=name)
        self.words = [
            *(sys.executable, "-m", "launcher", f"conf={conf}", "experiment_name=tried", f"trial_name={name}"),
            *(f"trainer.command={command}", f"trainer.cwd={folder}", f"cluster.fileroot={folder / 'runs'}"),
            *("restart.wait_initial_s=0.1", "restart.cluster=0", *settings),
        ]
        self.driver: subprocess.Popen | None = None

    def start(self):
        with (self.folder / "said.txt").open("a") as said:
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            self.driver = subprocess.Popen(
                self.words, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        if self.driver is not None and self.driver.poll() is None:
            self.driver.send_signal(signal.SIGINT)
            try:
                self.driver.wait(scaled(60))
            except subprocess.TimeoutExpired:
                self.driver.kill()
        for process in self.tree():
            with contextlib.suppress(ProcessLookupError):  # ended since
                os.kill(process, signal.SIGKILL)

    def said(self) -> str:
        return (self.folder / "said.txt").read_text()

    def events(self, *names: str) -> list[dict]:
        return [event for event in read_lines(self.paths.events) if not names or event["event"] in names]

    def steps(self) -> list[int]:
        return [int(line["global_step"]) for line in current_lines(read_lines(self.paths.metrics))]

    def tree(self) -> list[int]:
        """Every process that was started by the command, and the command."""
        return [process.pid for process in bearing(mark_of(self.paths))]

    def trainer_pid(self, script: str = PROGRAM.name) -> int | None:
        """The command's own process."""
        for pid in self.tree():
            try:
                if any(word.endswith(script) for word in psutil.Process(pid).cmdline()):
                    return pid
            except psutil.NoSuchProcess:
                continue
        return None

    def rank(self) -> int | None:
        """The process that trains, where the command has started it; its workers have the same command line."""
        for pid in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                lines = [one.cmdline()[1:3] if one else [] for one in (process, process.parent())]
                if lines[0] == ["-u", "train.py"] != lines[1]:
                    return pid
        return None

    def wait_until(self, holds, what: str):
        give_up_at = time.monotonic() + scaled(self.deadline_s)
        while not (found := holds()):
            assert time.monotonic() < give_up_at, f"{what}: not within its time\n{self.said()[-3000:]}"
            assert self.driver.poll() is None, f"{what}: the run has ended\n{self.said()[-3000:]}"
            time.sleep(0.05)
        return found

    def wait_steps(self, count: int):
        self.wait_until(lambda: self.steps()[-1:] >= [count], f"step {count}")

    def wait_end(self) -> int:
        return self.driver.wait(scaled(self.deadline_s))

    def kill_trainer(self, number: signal.Signals = signal.SIGKILL, script: str = PROGRAM.name):
        """Signal the command, once it runs; its pid."""
        pid = self.wait_until(lambda: self.trainer_pid(script), "a trainer runs")
        os.kill(pid, number)
        return pid

    def incidents(self) -> list[tuple[str, bool]]:
        """Cause, and whether it was repaired, of each that has ended."""
        return [(event["cause"], event["is_mended"]) for event in self.events("incident.ended")]
