"""A whole supervised run on stand-in servers, as a process whose children a test may kill.

`python -m tests.supervised_run FILEROOT STEPS SERVERS` runs it: the real driver, Coordinator, HealthMonitor and
trainer, the small real model; only SGLang is a stand-in, whose log-probs are those of the weights that it holds.
`SupervisedRun` is the test's side of it.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from launcher import driver
from launcher.config import DatasetConfig, FreqConfig, RecoverConfig, RunConfig
from launcher.journal import read_lines, standing_lines
from launcher.run_paths import RunPaths

ASSETS = Path(__file__).parents[1] / "assets" / "arithmetic"
STAND_IN = (sys.executable, "-m", "tests.stand_in_server", "--truthful", "--seconds-per-token", "0.01")
BATCH = 4
DEADLINE_S = 400


def run_config(fileroot: str, steps: int, servers: int) -> RunConfig:
    config = RunConfig(experiment_name="supervised", total_train_steps=steps)
    config.cluster.fileroot = fileroot
    config.train_dataset = DatasetConfig(path=str(ASSETS / "train.jsonl"), batch_size=BATCH)
    config.gconfig.n_samples, config.gconfig.max_new_tokens = 2, 26
    config.reward.fn = "tests.rewards:by_text"
    config.actor.path = config.ref.path = config.sglang.model_path = config.tokenizer_path = str(ASSETS / "model")
    config.actor.dtype = config.sglang.dtype = config.ref.dtype = "float32"
    config.actor.device = config.sglang.device = "cpu"
    config.actor.threads, config.actor.optimizer.lr = 1, 3e-4
    config.sglang.n_servers, config.sglang.context_length, config.sglang.random_seed = servers, 256, 1
    config.recover = RecoverConfig(freq_steps=5)
    config.evaluator.freq_steps = config.saver.freq_steps = FreqConfig().freq_steps
    return config


def main() -> None:
    sys.exit(driver.run(run_config(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), server_entry=STAND_IN))


class SupervisedRun:
    """Started at once; at the end of the block it and all that it started are ended."""

    def __init__(self, fileroot: Path, *, steps: int, servers: int) -> None:
        self.steps = steps
        self.paths = RunPaths.of(run_config(str(fileroot), steps, servers))
        self._command = [sys.executable, "-m", "tests.supervised_run", str(fileroot), str(steps), str(servers)]

    def __enter__(self) -> "SupervisedRun":
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for process in family:
            if process.is_running():
                process.kill()

    # ── what it wrote ──

    def events(self, name: str, subject: str = "") -> list[dict]:
        return [
            event
            for event in read_lines(self.paths.events)
            if event["event"] == name and subject in ("", event["subject"])
        ]

    def ledger(self) -> list[dict]:
        return list(read_lines(self.paths.ledger))

    def steps_done(self) -> int:
        return max((line["global_step"] for line in self.ledger()), default=-1) + 1

    def server_pids(self) -> dict[str, int]:
        return {event["subject"]: event["pid"] for event in self.events("server.ready")}

    def trainer_pids(self) -> list[int]:
        return [e["pid"] for name in ("trainer.started", "trainer.restarted") for e in self.events(name)]

    def coordinator_pids(self) -> list[int]:
        return [e["pid"] for name in ("run.initializing", "coordinator.adopted") for e in self.events(name)]

    def monitor_pids(self) -> list[int]:
        return [event["pid"] for event in self.events("monitor.started")]

    # ── what a test does ──

    def wait_until(self, holds, what: str) -> None:
        give_up_at = time.monotonic() + DEADLINE_S
        while not holds():
            assert self.process.poll() is None, f"{what}: the run ended\n{self.process.communicate()[0]}"
            assert time.monotonic() < give_up_at, f"{what}: not within {DEADLINE_S} s\n{self.tail()}"
            time.sleep(0.02)

    def wait_steps(self, n: int) -> None:
        self.wait_until(lambda: self.steps_done() >= n, f"{n} steps")

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def finish(self) -> str:
        """Its output, after it ended with 0."""
        said = self.process.communicate(timeout=DEADLINE_S)[0]
        assert self.process.returncode == 0, f"{said}\n{self.tail()}"
        return said

    def stop(self) -> str:
        """End a run that has shown what it should, with Ctrl-C: its steps are those that it has taken."""
        self.process.send_signal(signal.SIGINT)
        said = self.process.communicate(timeout=DEADLINE_S)[0]
        assert self.process.returncode == 130, f"{said}\n{self.tail()}"
        self.steps = self.steps_done()
        return said

    def tail(self) -> str:
        return "\n".join(str(event) for event in list(read_lines(self.paths.events))[-25:])

    def check_ledger(self) -> None:
        """Each step stands once, on its own version, and no prompt twice: they are all of the first epoch."""
        standing = standing_lines(self.ledger())
        assert [line["global_step"] for line in standing] == list(range(self.steps))
        assert [line["weight_versions"] for line in standing] == [[step] for step in range(self.steps)]
        assert max(Counter(i for line in standing for i in line["prompt_ids"]).values()) == 1


if __name__ == "__main__":
    main()
