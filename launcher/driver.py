"""The composition root: starts the actors in order, waits for the outcome, stops them in reverse.

    check data ─► lock the run ─► choose the checkpoint ─► Ray ─► servers ┐
                                                                 trainer ┴─► run ─► word, summary, exit code

Whatever happens after the first actor is started, the servers' process trees are gone before `run` returns (P8).
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.cluster import ray_cluster
from actors.dataset import load_records
from actors.reward_pool import RewardPool
from actors.sglang_server import SGLangServer
from actors.trainer import Trainer
from launcher.checkpoints import Checkpoint
from launcher.config import RunConfig
from launcher.errors import LauncherError, RunError, TrainerError
from launcher.hardware import device_for, find_hardware
from launcher.interrupts import Interrupts
from launcher.journal import Journal
from launcher.messages import EXIT_CODES, Outcome, RunWord, ServerInfo, Snapshot, TrainerEnd, TrainerReady
from launcher.resume import already_finished, resume_point
from launcher.run_paths import RunLock, RunPaths
from launcher.screen import Screen

POLL_S = 0.25
STOP_TIMEOUT_S = 30.0
"""For each of: the step under way with its checkpoint after a first Ctrl-C, and a server's end."""

T = TypeVar("T")


class Aborted(Exception):
    """The user ended the run before it had begun to step."""


def run(config: RunConfig) -> int:
    """Run `config` to its end and return the exit code (DESIGN.md §5).

    Raises the UsageErrors that can be known before anything is started; later ones are told as the run's outcome.
    """
    check_data(config)
    paths = RunPaths.of(config)
    paths.prepare()
    with RunLock(paths) as lock, Screen(config, paths) as screen:
        if finished := already_finished(config, paths):
            screen.line(finished)
            return EXIT_CODES[RunWord.FINISHED]
        resume = resume_point(config, paths)
        attempt = lock.next_attempt()
        screen.begin(attempt)
        journal = Journal(paths.events, attempt, time.time)
        outcome = Launch(config, paths, attempt, journal, screen).run(resume)
        screen.close(outcome)
        return EXIT_CODES[outcome.word] if outcome.exit_code is None else outcome.exit_code


def check_data(config: RunConfig) -> None:
    """Read every record, and score one answer: whatever is wrong with them costs seconds now and a cluster later."""
    records = load_records(config.train_dataset, key="train_dataset")
    if config.valid_dataset is not None:
        load_records(config.valid_dataset, key="valid_dataset")
    with RewardPool(config.reward) as pool:
        pool.check(records[0])


class Launch:
    """One attempt of a run, from the first actor to the last word."""

    def __init__(self, config: RunConfig, paths: RunPaths, attempt: int, journal: Journal, screen: Screen) -> None:
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._journal = journal
        self._screen = screen
        self._interrupts = Interrupts()
        self._hardware = find_hardware()
        self._trainer: Any = None
        self._servers: list[Any] = []
        self._steps_seen = 0
        self._look: ray.ObjectRef[Snapshot] | None = None
        self._lost = ""

    def run(self, resume: Checkpoint | None) -> Outcome:
        """Start, step, stop. Never raises for what a run can meet: the outcome says it."""
        self._journal.record("run.started", reason="resumed" if resume else "fresh", resume_from=str(resume or ""))
        with self._interrupts:
            try:
                outcome = self._supervised(resume)
            except (Aborted, KeyboardInterrupt):
                outcome = Outcome(word=RunWord.ABORTED, reason="ended by the user", next_command=same_command())
            except LauncherError as error:
                outcome = Outcome(
                    word=RunWord.ERRORED, reason=str(error), next_command=same_command(), exit_code=error.exit_code
                )
            except Exception as error:  # noqa: BLE001 - a run ends in a word, whatever happened (P9)
                self._journal.record("run.broke", reason=repr(error), traceback=traceback.format_exc())
                outcome = Outcome(word=RunWord.ERRORED, reason=repr(error), next_command=same_command())
        self._journal.record(
            f"run.{outcome.word.lower()}",
            reason=outcome.reason,
            global_step=outcome.last_step,
            total_train_steps=self._config.total_train_steps,
            total_train_epochs=self._config.total_train_epochs,
        )
        return outcome

    def _supervised(self, resume: Checkpoint | None) -> Outcome:
        cpus = self._config.sglang.n_servers * self._config.sglang.num_cpus + self._config.actor.num_cpus
        with ray_cluster(self._config, self._paths, num_cpus=cpus):
            try:
                ready = self._start(resume)
                return self._watch(ready)
            finally:
                self._stop()

    # ── start ──

    def _start(self, resume: Checkpoint | None) -> TrainerReady:
        """Servers and trainer start side by side, since both mostly import. Raises what any of them raises.

        Where they share a GPU, the servers go first: SGLang takes its share of what is free when it starts.
        """
        servers = [self._start_server(index, resume) for index in range(self._config.sglang.n_servers)]
        self._screen.milestone(f"starting {len(servers)} SGLang server(s) and the trainer")
        share_gpu = self._on_gpu(self._config.sglang.device) and self._on_gpu(self._config.actor.device)
        answers = self._each(servers) if share_gpu else {}
        self._trainer = self._make_trainer()
        preparing = self._trainer.start.remote(None if resume is None else resume.path)
        answers |= self._each([preparing] if share_gpu else [preparing, *servers])
        ready: TrainerReady = answers[preparing]
        self._get(self._trainer.set_servers.remote([answers[server] for server in servers]))
        return ready

    def _make_trainer(self) -> Any:
        config = self._config.actor
        options = {
            "name": "trainer",
            "num_cpus": config.num_cpus,
            "num_gpus": config.gpu_fraction if self._on_gpu(config.device) else 0,
        }
        return Trainer.options(**options).remote(self._config, self._paths, self._attempt)  # type: ignore[attr-defined]

    def _start_server(self, index: int, resume: Checkpoint | None) -> ray.ObjectRef[ServerInfo]:
        config = self._config.sglang
        options = {
            "name": f"server-{index}",
            "num_cpus": config.num_cpus,
            "num_gpus": config.gpu_fraction * config.tp_size if self._on_gpu(config.device) else 0,
        }
        server = SGLangServer.options(**options).remote(self._config, self._paths, index)  # type: ignore[attr-defined]
        self._servers.append(server)
        self._journal.record("server.starting", subject=f"server-{index}")
        server.start.remote(
            generation=0,
            model_path=config.model_path if resume is None else str(resume.path),
            weight_version=0 if resume is None else resume.policy_version,
        )
        return server.wait_ready.remote()  # type: ignore[no-any-return]  # raises what `start` raises

    def _on_gpu(self, device: str) -> bool:
        return device_for(device, self._hardware) == "cuda"

    # ── run ──

    def _watch(self, ready: TrainerReady) -> Outcome:
        """Show what goes on until the trainer's loop has returned, and say how it ended."""
        if ready.next_step >= ready.total_steps:
            self._screen.line(f"nothing left to train: all {ready.total_steps} steps are done")
        running = self._trainer.run.remote()
        exits = {server.wait_exit.remote(): server for server in self._servers}
        stopping = False
        while True:
            done, _ = ray.wait([running, *exits], timeout=POLL_S)
            self._show()
            if running in done:
                return self._outcome(self._get(running))
            for ref in done:
                self._server_died(ref, exits.pop(ref))
            if (self._interrupts.asked or self._lost) and not stopping:
                stopping = True
                self._screen.line(self._lost or "stopping: the step under way is finished and saved")
                self._trainer.request_stop.remote()

    def _server_died(self, ref: ray.ObjectRef[Any], server: Any) -> None:
        try:
            exit_ = ray.get(ref)
        except RayActorError as error:
            self._lost = f"a server's actor died: {error}"
            return
        self._lost = f"{exit_.name} died: {exit_.reason}"
        self._journal.record(
            "server.died", subject=exit_.name, reason=exit_.reason, pid=exit_.pid, exit_code=exit_.exit_code
        )

    def _outcome(self, end: TrainerEnd) -> Outcome:
        self._show(wait=True)
        last_step = end.next_step - 1 if end.next_step else None
        if end.finished:
            word, reason, command = RunWord.FINISHED, f"all {end.next_step} steps", ""
        elif self._lost:
            word, reason, command = RunWord.ERRORED, self._lost, same_command()
        else:
            word, reason, command = (
                RunWord.ABORTED,
                "ended by the user" + ("" if last_step is None else f" after step {last_step}"),
                same_command(),
            )
        return Outcome(word=word, reason=reason, next_command=command, evals=end.evals, last_step=last_step)

    def _show(self, *, wait: bool = False) -> None:
        """Take in the trainer's newest snapshot; a trainer that doesn't answer costs nothing but a stale view."""
        if self._look is None:
            self._look = self._trainer.snapshot.remote(self._steps_seen)
        done, _ = ray.wait([self._look], timeout=STOP_TIMEOUT_S if wait else 0)
        if not done:
            return
        look, self._look = self._look, None
        with contextlib.suppress(RayActorError):  # its death is told by `run`'s own reference
            snapshot: Snapshot = ray.get(look)
            self._steps_seen += len(snapshot.reports)
            self._screen.show(snapshot.status, servers=snapshot.servers, reports=snapshot.reports, evals=snapshot.evals)

    # ── stop ──

    def _stop(self) -> None:
        """In reverse order. What doesn't end in time is killed; the guards end every server's tree in any case."""
        if self._trainer is not None:
            self._quietly([self._trainer.close.remote()])
        self._quietly([server.stop.remote() for server in self._servers])
        for actor in [self._trainer, *self._servers]:
            if actor is not None:
                ray.kill(actor)
        self._journal.record("run.stopped", reason="actors ended")

    def _quietly(self, refs: Sequence[ray.ObjectRef[Any]]) -> None:
        done, late = ray.wait(list(refs), num_returns=len(refs), timeout=STOP_TIMEOUT_S) if refs else ([], [])
        for ref in done:
            try:
                ray.get(ref)
            except (RayActorError, RayTaskError) as error:
                self._journal.record("actor.stop_failed", reason=str(error))
        for _ in late:
            self._journal.record("actor.stop_failed", reason=f"no answer within {STOP_TIMEOUT_S:g} s")

    # ── waiting ──

    def _each(self, refs: Sequence[ray.ObjectRef[Any]]) -> dict[ray.ObjectRef[Any], Any]:
        """All answers, each told as it comes. The first failure ends the wait, and so does an interrupt (Aborted)."""
        answers: dict[ray.ObjectRef[Any], Any] = {}
        while waiting := [ref for ref in refs if ref not in answers]:
            for ref in ray.wait(waiting, timeout=POLL_S)[0]:
                answers[ref] = self._get(ref)
                self._tell(answers[ref])
            if self._interrupts.asked:
                raise Aborted
        return answers

    def _tell(self, answer: ServerInfo | TrainerReady) -> None:
        if isinstance(answer, TrainerReady):
            self._screen.milestone(
                f"trainer ready: {answer.prompts} prompts, {answer.held_out} held out, "
                f"step {answer.next_step} of {answer.total_steps} is next"
            )
            return
        self._journal.record("server.ready", subject=answer.name, pid=answer.pid, weight_version=answer.weight_version)
        self._screen.milestone(f"{answer.name} READY at {answer.url}, weight_version {answer.weight_version}")

    def _get(self, ref: ray.ObjectRef[T]) -> T:
        """The value; an actor's own error is raised as itself, its death as a TrainerError."""
        try:
            return ray.get(ref)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, LauncherError):
                raise cause from None
            raise RunError(f"an actor failed: {cause!r}", f"see trainer.log in {self._paths.logs}") from error
        except RayActorError as error:
            raise TrainerError(
                f"an actor died: {error}", f"see {self._paths.logs}; the same command resumes"
            ) from error


def same_command() -> str:
    """The command of this run, to be typed again: it resumes."""
    return " ".join(["python -m launcher", *map(shlex.quote, sys.argv[1:])])
