"""A sweep of six real runs on stand-in servers, two of which find no memory; killed in its middle and started again."""

import contextlib
import csv
import os
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from launcher.config.compose import REPOSITORY
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths, login_name
from tests.support.machine import scaled

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
deadline_s = partial(scaled, 600)
STEPS = 4
MARK = "GRPO_TEST_SWEEP"
TINY = (
    *("conf=arithmetic_cpu", f"total_train_steps={STEPS}", "train_dataset.batch_size=4", "gconfig.n_samples=2"),
    *("gconfig.max_new_tokens=26", "valid_dataset.max_items=4", "recover.freq_steps=2"),
    *("reward.fn=tests.support.rewards:by_text", "sglang.max_total_tokens=4000,5000,20000"),
    *("rollout.max_concurrent_rollouts=2,4", "sglang.memory_limit_gib=1.5"),
)
"""The kernel's limit leaves a server room for 5000 tokens of its pool, and not for 20000."""


class Sweep:
    """`start` it as often as needed; at the end of the block it and all that it started are gone."""

    def __init__(self, fileroot):
        self.fileroot = fileroot
        self.console = fileroot / "console.log"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):  # ended since
                process.kill()

    def start(self) -> subprocess.Popen:
        with self.console.open("ab") as console:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.programs.sweep_run", "-m", *TINY, f"cluster.fileroot={self.fileroot}"],
                cwd=REPOSITORY,
                env={**os.environ, MARK: str(self.fileroot)},
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.console.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.fileroot) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def runs(self) -> list[RunPaths]:
        """Of the trials that were started."""
        logs = self.fileroot / "logs" / login_name() / "arithmetic_cpu"
        names = sorted(logs.iterdir()) if logs.exists() else []
        return [
            RunPaths(
                fileroot=self.fileroot, user=login_name(), experiment_name="arithmetic_cpu", trial_name=folder.name
            )
            for folder in names
        ]

    def events(self, name: str) -> dict[str, int]:
        """How often, by trial."""
        counts = {run.trial_name: sum(e["event"] == name for e in read_lines(run.events)) for run in self.runs()}
        return {trial: count for trial, count in counts.items() if count}

    def steps(self) -> dict[str, list[int]]:
        """Every step that was committed, by trial."""
        return {run.trial_name: [line["global_step"] for line in read_lines(run.ledger)] for run in self.runs()}

    def wait_for(self, holds, process=None) -> None:
        give_up_at = time.monotonic() + deadline_s()
        while not holds():
            assert process is None or process.poll() is None, self.said()
            assert time.monotonic() < give_up_at, self.said()
            time.sleep(0.05)

    def rows(self) -> list[dict[str, str]]:
        (file,) = self.fileroot.glob("sweeps/*/*/*/sweep.csv")
        with file.open() as lines:
            return list(csv.DictReader(lines))


def test_two_of_six_run_out_of_memory_and_nothing_is_run_twice(tmp_path):
    with Sweep(tmp_path) as sweep:
        process = sweep.start()
        # two are over, and the third has taken a step
        sweep.wait_for(lambda: len(sweep.events("run.finished")) == 2 and len(sweep.steps()) == 3, process)
        sweep.wait_for(lambda: min(map(len, sweep.steps().values())) >= 1, process)
        process.kill()
        process.wait()
        sweep.wait_for(lambda: not sweep.family())  # the trial under way has saved and ended by itself
        before = sweep.steps()
        done = sweep.events("run.finished")

        process = sweep.start()
        process.wait(deadline_s())
        said = sweep.said()
        assert process.returncode == 0, said
        assert sweep.family() == []

        rows = sweep.rows()
        assert [row["ended"] for row in rows] == ["FINISHED"] * 4 + ["ERRORED"] * 2, said
        assert [row["cause"] for row in rows] == [""] * 4 + ["server_oom"] * 2
        assert [row["sglang.max_total_tokens"] for row in rows if row["cause"]] == ["20000"] * 2
        assert all("allocate memory" in row["reason"] or "MemoryError" in row["reason"] for row in rows[4:])
        for row in rows[:4]:
            assert min(float(row[key]) for key in ("step_s", "tokens_per_s")) > 0
            assert row["incidents"] == ""
        assert said.count("recommended: ") == 1

        assert all(steps == list(range(STEPS)) for trial, steps in sweep.steps().items() if trial in before), (
            sweep.steps()
        )
        assert sum(len(steps) for steps in sweep.steps().values()) == 4 * STEPS, "each step of four trials once"
        attempts = sweep.events("run.started")
        assert {trial: attempts[trial] for trial in done} == dict.fromkeys(done, 1), "what is done is not started again"
        assert sorted(attempts.values()) in ([1] * 6, [1] * 5 + [2]), "only the one that was cut off is"
        # the swept settings were kept, and nothing was learnt for others
        assert sweep.events("memory.ran_out") == {}
        assert not (tmp_path / "memory").exists()
