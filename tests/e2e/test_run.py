"""The command that a user types, with the real SGLang: interrupted, resumed, and asked for once too often.

The wheel is run, in an empty folder. One test, since each launch costs half a minute of imports: what the first leaves
behind is what the second needs.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest

from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.run_files.journal import current_lines, read_lines
from launcher.run_files.run_paths import RunPaths, login_name
from tests.programs.supervised_run import command_of
from tests.support.machine import scaled

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 12
BATCH = 4
deadline_s = partial(scaled, 300)


class Command:
    """`python -m launcher` on the default experiment, made short."""

    def __init__(self, folder: Path, site: Path) -> None:
        fileroot = folder / "outputs" / "grpo"  # where it writes unless it is told
        self.environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
        self.folder = folder
        self.paths = RunPaths(
            fileroot=fileroot, user=login_name(), experiment_name="arithmetic_cpu", trial_name="trial0"
        )

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        settings = [
            "conf=arithmetic_cpu",
            f"total_train_steps={STEPS}",
            f"train_dataset.batch_size={BATCH}",
            "valid_dataset.max_items=8",
            "recover.freq_steps=100",
            *overrides,
        ]
        return subprocess.Popen(
            [sys.executable, "-m", "launcher", *settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.environment,
            start_new_session=True,
        )

    def ledger(self) -> list[dict]:
        return list(read_lines(self.paths.ledger))

    def wait_for_step(self, step: int, run: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + deadline_s()
        while not any(line["global_step"] >= step for line in self.ledger()):
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def server_pid(self) -> int:
        (pid,) = {event["pid"] for event in read_lines(self.paths.events) if event["event"] == "server.ready"}
        return pid


def family_of(*pids: int) -> list[psutil.Process]:
    """The processes and all their descendants; the server's host is not the driver's child."""
    heads = [psutil.Process(pid) for pid in pids]
    return [process for head in heads for process in (head, *head.children(recursive=True))]


def all_gone(processes: list[psutil.Process], within_s: float = 10.0) -> bool:
    return not psutil.wait_procs(processes, timeout=within_s)[1]


def test_a_run_is_interrupted_resumed_and_finished(tmp_path, site):
    command = Command(tmp_path, site)
    first = command.start()
    command.wait_for_step(2, first)
    family = family_of(first.pid, command.server_pid())
    assert any("sglang" in command_of(process) for process in family)
    python_path = psutil.Process(command.server_pid()).environ()["PYTHONPATH"]
    assert python_path.split(os.pathsep)[0] == str(site), "not the checkout"
    os.kill(first.pid, signal.SIGINT)
    said = first.communicate(timeout=deadline_s())[0]
    assert first.returncode == 130, said
    assert "ABORTED" in said
    assert all_gone(family)
    interrupted = command.ledger()
    saved = CheckpointStore(command.paths.default_checkpoints).latest_complete().checkpoint
    assert saved is not None
    assert saved.global_step == interrupted[-1]["global_step"] < STEPS - 1

    second = command.start()
    said = second.communicate(timeout=deadline_s())[0]
    assert second.returncode == 0, said
    assert "FINISHED" in said
    assert "held-out" in said
    lines = command.ledger()
    assert lines[: len(interrupted)] == interrupted
    assert [line["global_step"] for line in current_lines(lines)] == list(range(STEPS))
    assert [line["attempt"] for line in lines] == [1] * len(interrupted) + [2] * (STEPS - len(interrupted))
    assert max(Counter(i for line in lines for i in line["prompt_ids"]).values()) == 1
    assert [line["weight_versions"] for line in lines] == [[step] for step in range(STEPS)]
    metrics = list(read_lines(command.paths.metrics))
    assert [line["global_step"] for line in metrics] == list(range(STEPS))
    assert max(line["grpo_actor/logprob_distance/max"] for line in metrics) < 1e-4
    assert command.paths.report.stat().st_size > 10_000
    assert [event["event"] for event in read_lines(command.paths.events)].count("run.finished") == 1

    third = command.start()
    said = third.communicate(timeout=deadline_s())[0]
    assert third.returncode == 0
    assert "nothing to do" in said
    assert command.ledger() == lines
