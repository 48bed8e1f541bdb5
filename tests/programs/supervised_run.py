"""A whole supervised run on stand-in servers, as a process whose children a test may kill.

`python -m tests.programs.supervised_run FILEROOT STEPS SERVERS WEBHOOK RANKS [KEY=VALUE …]`: driver, Coordinator,
HealthMonitor, trainer and the small model are real; only SGLang is a stand-in, whose log-probs are those of the weights
that it holds. `SupervisedRun` is the test's side of it.
"""

import contextlib
import dataclasses
import json
import operator
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import yaml
from omegaconf import OmegaConf

from launcher import driver_process
from launcher.base.parent_death import end_with
from launcher.cli import keeper
from launcher.config import compose
from launcher.config.schema import DatasetConfig, FreqConfig, RecoverConfig, RunConfig
from launcher.reporting.current_status import read_now
from launcher.run_files import written_settings
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.check_ledger import audited_facts
from scripts.faults import broken_reward
from tests.support.machine import scaled

ASSETS = Path(__file__).parents[2] / "assets" / "arithmetic"
STAND_IN = (
    sys.executable,
    "-m",
    "tests.programs.stand_in_server",
    "--truthful",
    "--chatty",
    "--seconds-per-token",
    "0.01",
)
BATCH = 4
DEADLINE_S = 400
MARK = "GRPO_TEST_RUN"
REAL_SERVERS = "GRPO_TEST_REAL_SERVERS"
"""In its environment: the real SGLang."""
PROMPTS = 40
"""Ten steps an epoch: that a prompt is lost shows where an epoch ends."""
RAY_GIVES_UP_S = 60.0


def run_config(fileroot: str, steps: int, servers: int, ranks: int = 1) -> RunConfig:
    config = RunConfig(experiment_name="supervised", total_train_steps=steps, total_train_epochs=1000)
    config.cluster.fileroot = fileroot
    config.train_dataset = DatasetConfig(path=str(ASSETS / "train.jsonl"), batch_size=BATCH, max_items=PROMPTS)
    config.gconfig.n_samples = 2
    config.gconfig.max_new_tokens = 26
    config.reward.fn = "tests.support.rewards:switched"
    config.actor.path = config.ref.path = config.sglang.model_path = config.tokenizer_path = str(ASSETS / "model")
    config.actor.dtype = config.sglang.dtype = config.ref.dtype = "float32"
    config.actor.device = config.sglang.device = "cpu"
    config.actor.threads = 1
    config.actor.optimizer.lr = 3e-4
    config.actor.dp_size = ranks
    config.sglang.n_servers = servers
    config.sglang.context_length = 256
    config.sglang.random_seed = 1
    config.recover = RecoverConfig(freq_steps=5, first_steps=None, memory_share=1.0)
    config.evaluator.freq_steps = config.saver.freq_steps = FreqConfig().freq_steps
    config.reward_health.warmup_steps = 5  # short runs have short baselines
    config.reward.workers = 2
    return config


def main() -> None:
    if sys.argv[-1].startswith(keeper.TASK):
        sys.exit(driver_process.main(server_entry()))
    config = run_config(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5]))
    config.alerts.webhook = sys.argv[4] or None
    for word in sys.argv[6:]:
        key, _, value = word.partition("=")
        part, _, name = key.rpartition(".")
        setattr(operator.attrgetter(part)(config) if part else config, name, yaml.safe_load(value))
    if os.environ.get(REAL_SERVERS):
        config.sglang.max_total_tokens = 20000
        config.sglang.threads = 1
    if config.cluster.detached:
        from launcher import driver  # brings Ray along
        from launcher.cli import detached

        sys.exit(detached.run(config, driver.run, server_entry=server_entry()))
    keeper.DRIVER = ("-m", "tests.programs.supervised_run")
    keeper.begin(followed(config))


def followed(config: RunConfig) -> RunConfig:
    """With what follows another setting, and unchecked: some tests need a budget that no user may set."""
    values = OmegaConf.to_container(OmegaConf.create(dataclasses.asdict(config)), resolve=True)
    return compose._completed(written_settings._filled(RunConfig, values))


def server_entry() -> tuple[str, ...] | None:
    return None if os.environ.get(REAL_SERVERS) else STAND_IN


class SupervisedRun:
    """Started at once; at the end of the block it and all that it started are ended."""

    def __init__(
        self,
        fileroot: Path,
        *,
        steps: int,
        servers: int,
        webhook: str = "",
        ranks: int = 1,
        settings: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        console: Path | None = None,
    ) -> None:
        """`console`: the file for what it prints, where it must not be below `fileroot`.

        `settings`: further ones, as `cluster.address=…`. `environment`: in place of this process's.

        `prefix`: before its command, as `ip netns exec …`.
        """
        self.steps = steps
        self._environment = os.environ if environment is None else environment
        self.switch = fileroot / "switch.json"
        self.paths = RunPaths.of(run_config(str(fileroot), steps, servers))
        self._console = console or fileroot / "console.log"
        self._mark = uuid.uuid4().hex
        self._command = [*prefix, sys.executable, "-m", "tests.programs.supervised_run", str(fileroot)]
        self._command += [str(steps), str(servers), webhook, str(ranks), *settings]

    def __enter__(self) -> "SupervisedRun":
        with self._console.open("wb") as console:  # a pipe that nobody reads would stop the run when it is full
            self.process = subprocess.Popen(
                self._command,
                env={**self._environment, MARK: self._mark, broken_reward.VARIABLE: str(self.switch)},
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_ended_with(os.getpid()),  # noqa: PLW1509 - it calls the kernel alone
            )
        return self

    def __exit__(self, *_: object) -> None:
        family = self.family()
        self.process.kill()
        self.process.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended since
                process.kill()

    def family(self) -> list[psutil.Process]:
        """Every process that bears the run's mark in its environment, wherever it was started and by whom."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def said(self) -> str:
        return self._console.read_text(errors="replace")

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

    def ready_now(self) -> list[str]:
        """The servers that the driver last heard to be READY."""
        now = read_now(self.paths)
        return [] if now is None else [server.name for server in now.servers if server.state == "READY"]

    def trainer_pids(self) -> list[int]:
        return [e["pid"] for name in ("trainer.started", "trainer.restarted") for e in self.events(name)]

    def coordinator_pids(self) -> list[int]:
        return [e["pid"] for name in ("run.initializing", "coordinator.adopted") for e in self.events(name)]

    def monitor_pids(self) -> list[int]:
        return [event["pid"] for event in self.events("monitor.started")]

    # ── what a test does ──

    def wait_until(self, holds, what: str) -> None:
        give_up_at = time.monotonic() + scaled(DEADLINE_S)
        while not holds():
            assert self.process.poll() is None, f"{what}: the run ended\n{self.said()}"
            assert time.monotonic() < give_up_at, f"{what}: not within {DEADLINE_S} s\n{self.tail()}"
            time.sleep(0.02)

    def wait_steps(self, n: int) -> None:
        self.wait_until(lambda: self.steps_done() >= n, f"{n} steps")

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def break_reward(self, do: str, **more: object) -> None:
        """From the next completion on, until `mend_reward`."""
        whole = self.switch.with_suffix(".whole")
        whole.write_text(json.dumps({"do": do, "share": 1.0, "seed": 1, **more}))
        whole.rename(self.switch)

    def mend_reward(self) -> None:
        self.switch.unlink()

    def incidents(self) -> dict[int, tuple[str, str, bool | None]]:
        """By number: cause, subject, and whether it was mended (None: it is open)."""
        found: dict[int, tuple[str, str, bool | None]] = {}
        for event in read_lines(self.paths.events):
            if event["event"] == "incident.began":
                assert event["incident"] not in found, "a number is given once"
                found[event["incident"]] = (event["cause"], event["subject"], None)
            elif event["event"] == "incident.ended":
                assert found[event["incident"]][2] is None, "an incident ends once"
                found[event["incident"]] = (event["cause"], event["subject"], event["is_mended"])
        assert list(found) == list(range(1, len(found) + 1))
        return found

    def finish(self) -> str:
        """Its output, after it ended with 0."""
        self.process.wait(scaled(DEADLINE_S))
        assert self.process.returncode == 0, f"{self.said()}\n{self.tail()}"
        return self.said()

    def stop(self) -> str:
        """End a run that has shown what it should, with Ctrl-C: its steps are those that it has taken."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(scaled(DEADLINE_S))
        assert self.process.returncode == 130, f"{self.said()}\n{self.tail()}"
        self.steps = self.steps_done()
        return self.said()

    def of_ray(self, title: str) -> psutil.Process:
        """Ray's own process of that name or title."""
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # ended since
                found += [one] if title in (one.name(), command_of(one)) else []
        assert found, f"Ray has no process {title} at the moment"
        return found[0]

    def lose_ray(self, vital: str) -> None:
        """Kill Ray's own process of that name, where no new cluster may be started: the run ends in a word, and leaves
        nobody."""
        self.of_ray(vital).kill()
        self.process.wait(scaled(60))
        assert self.process.returncode == 3, self.said()
        assert f"Ray's own process {vital} ended" in self.said()
        self.wait_gone()

    def wait_gone(self, seconds: float = 10.0) -> None:
        """Until nobody of the run lives. Fails with their commands.

        A worker that Ray was still starting, or that no actor was given to, has nothing of the run in it. It asks a GCS
        that is gone, and leaves by itself after Ray's own deadlines for that (26 s were seen): it has `RAY_GIVES_UP_S`.
        """
        began = time.monotonic()
        while family := self.family():
            commands = [command_of(process) for process in family]
            limit = scaled(RAY_GIVES_UP_S) if all(_is_of_ray_alone(command) for command in commands) else seconds
            assert time.monotonic() < began + limit, [command[:120] for command in commands]
            time.sleep(0.1)

    def tail(self) -> str:
        return "\n".join(str(event) for event in list(read_lines(self.paths.events))[-25:])

    def check_ledger(self, *, is_whole: bool = True, was_killed: bool = False) -> None:
        """Nothing lost, doubled or stale; and where it `is_whole`, all of that is known, and each step was taken.

        `was_killed`: its newest checkpoint may be behind its ledger, and only a resume shows what came between.
        """
        found = audited_facts(self.paths).audit
        assert found is not None
        assert found.problems == ()
        if is_whole:
            behind = f"were lost after step {found.loss_known_until}, of the newest complete checkpoint"
            not_known = [what for what in found.not_known if not (was_killed and what.endswith(behind))]
            assert (not_known, found.steps) == ([], self.steps)


def _ended_with(parent: int) -> Callable[[], None]:
    """As by Ctrl-C the run saves and ends where a signal has ended pytest, which then leaves no block."""
    tie = end_with(parent, signal.SIGINT, code=130)

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores it
        tie()

    return begin


def command_of(process: psutil.Process) -> str:
    """Empty: it is gone."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def _is_of_ray_alone(command: str) -> bool:
    """Whether it is a worker of Ray's without an actor. One that has reached Ray is renamed to `ray::IDLE`, and one
    that has an actor to the actor's name."""
    return command in ("", "ray::IDLE") or "/ray/_private/workers/default_worker.py" in command


if __name__ == "__main__":
    main()
