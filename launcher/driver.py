"""The composition root: creates the actors, passes the run to the Coordinator, shows it, and reports its outcome.

    check data ─► lock the run ─► check the resume ─► Ray ─► actors ─► Coordinator ─► status, summary, exit code

The driver owns every actor, so all of them end with it, and the servers' process trees with them (P8). It decides
nothing: an actor that dies is restarted by Ray and set up again by the Coordinator, and a question to one that is being
restarted is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.cluster.actor_calls import as_ours
from actors.cluster.heartbeat import CrashLoop, Heartbeat
from actors.cluster.joined_cluster import HeadWatch, make_ready
from actors.cluster.placement_group import RunPlacement
from actors.cluster.ray_cluster import VitalProcesses, end_leftovers, ray_cluster
from actors.foreign.foreign_actors import ForeignActors, ServedActors
from actors.processes.process_tree import Process, descendants, identify
from actors.reward.data_check import check_data
from actors.supervision.incident_artifacts import collect
from actors.supervision.run_actors import RunActors
from launcher.base.durable import replace_file
from launcher.base.errors import LauncherError, RunError
from launcher.base.exit_codes import AGAIN, EXIT_CODES, RESUMES
from launcher.base.messages import Cause, RunOutcome, TerminalStatus
from launcher.base.utc_offsets import local_offsets
from launcher.base.wording import counted
from launcher.checkpoints.in_memory_checkpoints import name_run
from launcher.checkpoints.restore_request import take_restore
from launcher.checkpoints.resume_decision import already_finished, resume_point
from launcher.checkpoints.uploads import fetch_if_empty, record_fetched, remote_of
from launcher.cli.attempt_incidents import begin_incident, begin_memory, last_line, number_of_incident, record_begun
from launcher.cli.deadlines import Deadlines
from launcher.cli.interrupts import Interrupts, NoInterrupts
from launcher.cli.keeper import DriverTask
from launcher.cli.run_end import BEFORE_IT_BEGAN, ends_the_run, finish
from launcher.cli.run_screen import RunFollower, Screen
from launcher.cli.unattended import DRIVER_ACTOR, Unattended, hide_webhook, same_command, typed_command
from launcher.config.foreign import OWN, SERVERS
from launcher.config.schema import RunConfig
from launcher.policy.next_attempt import Again, BeginAgain
from launcher.reporting.current_status import CurrentStatusFile, DriverFacts
from launcher.resources.hardware import find_hardware
from launcher.resources.memory_history import MemoryHistory
from launcher.resources.run_plan import RunPlan
from launcher.resources.seen_memory import SeenMemory
from launcher.run_files import control_requests
from launcher.run_files.journal import Journal, Record, encode, last_of
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunLock, RunPaths, next_attempt

POLL_S = 0.25
ASK_AGAIN_S = 0.5
"""After an actor was not there: Ray restarts it in about a second."""
STALLED_S = 10.0
"""A disk takes a line in milliseconds. Whoever ended the run by hand else sees a command that stands, and no reason."""
SUPERVISORS = ("coordinator.placed", "monitor.started")
"""Events with the pid of each."""
SAME_COMMAND = "the same command resumes"


class AttemptEnded(Exception):
    """Its cluster was lost, or it halted for what may pass: the keeper is asked for another attempt."""


def run(
    config: RunConfig,
    *,
    server_entry: tuple[str, ...] | None = None,
    unattended: Unattended | None = None,
    task: DriverTask | None = None,
    plan: RunPlan | None = None,
    interrupts: Interrupts | None = None,
) -> int:
    """Run `config` to its end and return the exit code (docs/design.md).

    `server_entry`: in SGLang's place, for tests. `task`: the keeper's, which holds the run's lock and may begin another
    attempt; None: there is no keeper. `plan`: of its memory. `interrupts`: those that listen already.
    Raises the UsageErrors that can be known before anything is started; later ones are the outcome.
    """
    before = None if task is None else task.before
    if interrupts is None:
        interrupts = Interrupts() if unattended is None else NoInterrupts()
    is_ours = config.trainer.adapter == OWN
    if before is None:
        _check(config, plan)
    paths = RunPaths.of(config)
    paths.prepare()
    out = sys.stdout if unattended is None else unattended.out
    lock = RunLock(paths) if task is None else contextlib.nullcontext()
    with interrupts, lock, Screen(config, paths, out, began=None if task is None else task.began) as screen:
        with contextlib.nullcontext() if before is None else ends_the_run(paths):
            if before is not None:
                _check(config, plan)
            remote = remote_of(config)
            if finished := already_finished(config, paths):
                screen.line(finished)
                return EXIT_CODES[TerminalStatus.FINISHED]
            fetched = None if remote is None else fetch_if_empty(config, paths, remote)
            resume = resume_point(config, paths) if is_ours else None
            ServerKeys.make(paths.keys)
            hide_webhook(config, paths)
            if before is None and (unattended is None or not unattended.is_again):
                control_requests.forget(paths)
            name_run(paths)
            attempt = next_attempt(paths)
            written = screen.begin(attempt)
            journal = Journal(paths.events, attempt, time.time)
            if forgotten := begin_memory(paths, attempt, has_command=not is_ours):
                screen.line(forgotten)
            if is_ours and (asked := take_restore(paths, journal)) is not None:
                screen.line(f"resuming from {asked}, as it was set up")
                resume = asked
            if fetched is not None and remote is not None:
                screen.line(record_fetched(fetched, remote, journal))
            interrupts.ends_at_once = False  # from here on there is an end to record
            incident = None if before is None else begin_incident(journal, paths, before)
            journal.record(
                "run.started",
                reason="resumed" if resume else "fresh",
                resume_from=str(resume or ""),
                command=same_command(unattended),
                folder=str(Path.cwd()),
                utc_offsets=local_offsets(time.time()),
                settings=written.name,
            )
        launch = RunLaunch(
            config,
            paths,
            journal,
            screen,
            server_entry=server_entry,
            unattended=unattended,
            interrupts=interrupts,
            plan=plan,
            task=task,
            incident=incident,
        )
        try:
            outcome = launch.run()
        except AttemptEnded:
            return AGAIN
        if problem := finish(config, paths, journal, outcome):
            screen.line(problem)
        screen.close(outcome)
        return EXIT_CODES[outcome.status] if outcome.exit_code is None else outcome.exit_code


def _left_by_the_driver_before() -> list[Process]:
    """All that the keeper has adopted: its children, less this process and what that has started."""
    own = {identify(os.getpid()), *descendants(os.getpid())}
    return [process for process in descendants(os.getppid()) if process not in own]


def _check(config: RunConfig, plan: RunPlan | None) -> None:
    if config.trainer.adapter != OWN:
        return
    checkpoint_bytes = 0 if plan is None else plan.checkpoint_bytes
    for note in check_data(config, tell_length=print, checkpoint_bytes=checkpoint_bytes):
        print(f"note: {note}", file=sys.stderr)


class RunLaunch:
    """One attempt of a run, from the first actor to the outcome."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        journal: Journal,
        screen: Screen,
        *,
        server_entry: tuple[str, ...] | None = None,
        unattended: Unattended | None = None,
        interrupts: Interrupts | None = None,
        plan: RunPlan | None = None,
        task: DriverTask | None = None,
        incident: Record | None = None,
    ) -> None:
        """`incident`: the one that this attempt takes another's place for."""
        self._config = config
        self._paths = paths
        self._journal = journal
        self._screen = screen
        self._server_entry = server_entry
        self._unattended = unattended
        self._interrupts = interrupts or Interrupts()
        self._task = task
        self._before = None if task is None else task.before
        self._incident = incident
        driver = DriverFacts.of_this_process(
            paths, journal.attempt, address=config.cluster.address, is_detached=unattended is not None
        )
        self._now = CurrentStatusFile(paths, driver)
        began = None if task is None else task.began
        self._deadlines = Deadlines(config, journal, self._interrupts, began=began)
        self._shown = RunFollower(paths, journal, screen, SeenMemory(plan, journal), self._deadlines)
        self._actors: RunActors | ForeignActors | None = None

    def run(self) -> RunOutcome:
        """Raises AttemptEnded where another attempt is to follow; of what else a run can meet the outcome tells."""
        with self._deadlines:
            try:
                outcome = self._supervised()
            except AttemptEnded:
                raise
            except KeyboardInterrupt as error:
                why = "" if self._interrupts.asked else self._deadlines.reason
                reason = str(error) or why or "ended by the user, at once"
                outcome = RunOutcome(status=TerminalStatus.ABORTED, reason=reason)
            except LauncherError as error:
                code = (error if self._before is None else RunError).exit_code  # what began is not refused
                outcome = RunOutcome(status=TerminalStatus.ERRORED, reason=str(error), exit_code=code)
            except Exception as error:  # noqa: BLE001 - a run ends with a status, whatever happened (P9)
                self._journal.record("run.broke", reason=repr(error), traceback=traceback.format_exc())
                outcome = RunOutcome(status=TerminalStatus.ERRORED, reason=repr(error))
        if outcome.status is TerminalStatus.ABORTED and self._deadlines.reason and not self._interrupts.asked:
            outcome = dataclasses.replace(outcome, exit_code=RESUMES)
        if outcome.status is not TerminalStatus.FINISHED:
            outcome = dataclasses.replace(outcome, next_command=typed_command(self._unattended))
        self._journal.record(
            f"run.{outcome.status.lower()}",
            reason=outcome.reason,
            global_step=outcome.last_step,
            exit_code=EXIT_CODES[outcome.status] if outcome.exit_code is None else outcome.exit_code,
            total_train_steps=self._config.total_train_steps,
            total_train_epochs=self._config.total_train_epochs,
        )
        return outcome

    def _supervised(self) -> RunOutcome:
        if self._before is not None and self._incident is not None:
            self._begin_after(self._before, self._incident)
        outcome = self._on_its_cluster()
        if outcome.may_pass and self._may_begin_anew() and not self._interrupts.asked:
            raise self._ask_again(Cause.RUN_HALTED, outcome.reason)
        return outcome

    def _begin_after(self, before: BeginAgain, incident: Record) -> None:
        """Show why this attempt begins, end what the driver before has left, and wait as long as the keeper says."""
        self._shown.tell(incident)
        logs = {name: Path(file) for name, file in before.logs.items()}
        number = number_of_incident(incident)
        asyncio.run(collect(self._paths, number, facts=incident, logs=logs, pids={}))
        # Without patience: a killed driver's trainer may still step, and its state is what this attempt resumes from.
        end_leftovers(find=_left_by_the_driver_before, patience_s=0.0)
        while time.monotonic() < before.not_before:
            if self._is_stopped():
                raise KeyboardInterrupt("" if self._deadlines.reason else BEFORE_IT_BEGAN)
            time.sleep(POLL_S)
            self._now.write_if_due()

    def _may_begin_anew(self) -> bool:
        """What never worked under this command may never work: only a command that has taken a step begins anew."""
        last = last_line(self._paths).get("attempt")
        has_stepped = self._task is not None and isinstance(last, int) and last >= self._task.first_attempt
        return has_stepped and self._config.recover.mode != "off"

    def _on_its_cluster(self) -> RunOutcome:
        sglang, actor = self._config.sglang, self._config.actor
        cpus = sglang.n_servers * sglang.num_cpus + actor.dp_size * actor.num_cpus
        self._interrupts.spare_children()
        say, is_stopped = self._screen.milestone, self._is_stopped
        with ray_cluster(self._config, self._paths, num_cpus=cpus, say=say, is_stopped=is_stopped) as vital:
            self._interrupts.listen_again()
            if self._before is not None and self._incident is not None:
                number = number_of_incident(self._incident)
                record_begun(self._journal, self._paths, self._before, number)
            if self._config.cluster.address != "local":
                make_ready(self._config, self._paths, say, besides=DRIVER_ACTOR, is_stopped=is_stopped)
            try:
                return self._watch(self._create(vital), vital)
            except (Exception, KeyboardInterrupt) as error:
                if isinstance(vital, VitalProcesses) and (lost := vital.lost()):
                    raise self._lost(lost, vital) from error
                raise
            finally:
                self._end_actors(is_reachable=not vital.lost())

    def _is_stopped(self) -> bool:
        """For whatever is waited for before there is a Coordinator that could be asked to end the run."""
        return self._interrupts.asked or self._deadlines.is_due()

    def _lost(self, lost: str, vital: VitalProcesses) -> AttemptEnded:
        """Raises RunError, KeyboardInterrupt where the run ends."""
        # What ends with the cluster is not for the supervisors to judge, nor to repair.
        pids = [last_of(self._paths.events, name, self._journal.attempt).get("pid") for name in SUPERVISORS]
        vital.end({pid for pid in pids if isinstance(pid, int)})
        if self._interrupts.asked:
            raise KeyboardInterrupt(f"ended by the user; {lost}")
        if self._task is None:
            raise RunError(lost, SAME_COMMAND)
        if self._config.recover.mode == "off":
            raise RunError(lost, "recover.mode=off resumes nothing; give the new run another trial_name")
        return self._ask_again(Cause.CLUSTER_LOST, lost, logs=vital.logs)

    def _ask_again(self, cause: Cause, reason: str, *, logs: Mapping[str, Path] = MappingProxyType({})) -> AttemptEnded:
        """Raises RunError where the disk does not take it."""
        again = Again(
            cause=cause,
            reason=reason,
            began=time.monotonic(),
            logs={name: str(file) for name, file in logs.items()},
        )
        try:
            replace_file(self._paths.again, encode(dataclasses.asdict(again)))
        except OSError as error:
            raise RunError(f"{reason}; {self._paths.again} can't be written: {error}", SAME_COMMAND) from error
        return AttemptEnded(reason)

    def _create(self, vital: VitalProcesses | HeadWatch) -> Any:
        """All actors, each trivial until the Coordinator starts what it holds. Returns the Coordinator."""
        if self._config.trainer.adapter != OWN and self._config.trainer.rung != SERVERS:
            foreign = ForeignActors(self._config, self._paths, self._journal.attempt)
            self._actors = self._shown.actors = foreign
            return foreign.create(self._now.driver)
        placed = self._place(vital)
        servers = counted(self._config.sglang.n_servers, "SGLang server")
        self._screen.milestone(f"starting {servers} and the trainer: they import their libraries and load the model")
        history = MemoryHistory.of(self._config, self._paths.fileroot, find_hardware())
        kind = RunActors if self._config.trainer.adapter == OWN else ServedActors
        actors = kind(self._config, self._paths, self._journal.attempt, placed, self._server_entry)
        self._actors = self._shown.actors = actors
        return actors.create(history, self._now.driver)

    def _place(self, vital: VitalProcesses | HeadWatch) -> RunPlacement:
        placed = RunPlacement.book(self._config, is_stopped=lambda: self._is_stopped() or bool(vital.lost()))
        nodes = placed.nodes()
        self._journal.record("run.placed", reason="the cluster has room for all of it", nodes=nodes)
        for node in sorted(set(nodes.values()) if len(set(nodes.values())) > 1 else ()):
            self._screen.line(f"on node {node}: {', '.join(name for name in nodes if nodes[name] == node)}")
        return placed

    # ── watch ──

    def _watch(self, coordinator: Any, vital: VitalProcesses | HeadWatch) -> RunOutcome:
        """Show the run until the Coordinator reports the outcome. One that died is asked again when it is back.

        Raises RunError where Ray itself is gone, so that nobody is left to restart anything.
        """
        running = coordinator.run.remote()
        turns = math.ceil(self._config.health.supervisor_silence_s / POLL_S)
        heartbeat, incarnations = Heartbeat(coordinator.ping.remote, most_turns=turns), CrashLoop()
        has_told = False
        while True:
            done, _ = ray.wait([running], timeout=POLL_S)
            if lost := vital.lost():
                raise RunError(lost, SAME_COMMAND)
            if heartbeat.answer is not None:  # the Coordinator runs, and writes it
                self._now.hand_over()
            self._now.write_if_due()
            if another := self._now.another:
                raise RunError(f"its folder was removed, and another began there: {another} holds {self._paths.lock}")
            self._shown.say_lost(vital.lost_nodes())
            if heartbeat.has_stopped():
                self._journal.record("coordinator.hung", subject="coordinator", reason="it answers no question")
                ray.kill(coordinator, no_restart=False)
            self._shown.show(unwritten=heartbeat.answer or ())
            if self._interrupts.asked:
                if not has_told:
                    self._screen.line("stopping: the step under way is finished and saved")
                has_told = True
                coordinator.abort.remote(self._interrupts.reason)
            elif self._deadlines.is_due():
                coordinator.abort.remote(self._deadlines.reason)
            if done:
                try:
                    outcome: RunOutcome = ray.get(running)
                except RayTaskError as error:
                    raise as_ours(error) from error
                except RayError as error:
                    if incarnations.ended():
                        reason = f"the Coordinator dies each time it is started: {error}; see ray.log in the run's logs"
                        return RunOutcome(status=TerminalStatus.ERRORED, reason=reason, may_pass=True)
                    time.sleep(ASK_AGAIN_S)
                    incarnations.begins()
                    running = coordinator.run.remote()
                else:
                    self._shown.show()
                    return outcome

    def _end_actors(self, *, is_reachable: bool) -> None:
        """Without Ray's own processes they end themselves, and asking would wait for an answer that never comes."""
        if is_reachable and self._actors is not None:
            self._actors.end()
        waits = f"{self._paths.events} does not take the run's end: the command waits for its disk"
        telling = threading.Timer(STALLED_S, self._screen.line, [waits])
        telling.daemon = True
        telling.start()
        self._journal.record("run.stopped", reason="actors ended")
        telling.cancel()
