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
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.cluster.actor_calls import as_ours
from actors.cluster.cluster_restarts import (
    SAME_COMMAND,
    AttemptLost,
    ClusterRestarts,
    end_supervisors,
)
from actors.cluster.heartbeat import CrashLoop, Heartbeat
from actors.cluster.joined_cluster import HeadWatch, make_ready
from actors.cluster.placement_group import RunPlacement
from actors.cluster.ray_cluster import VitalProcesses, ray_cluster
from actors.foreign.foreign_actors import ForeignActors, ServedActors
from actors.reward.data_check import check_data
from actors.supervision.incident_artifacts import collect
from actors.supervision.run_actors import RunActors
from launcher.base.errors import LauncherError, RunError
from launcher.base.exit_codes import EXIT_CODES, RESUMES
from launcher.base.messages import RunOutcome, TerminalStatus
from launcher.base.utc_offsets import local_offsets
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints, name_run
from launcher.checkpoints.pending_restore import find_prepared, take
from launcher.checkpoints.resume_decision import already_finished, resume_point
from launcher.checkpoints.uploads import fetch_if_empty, finish_uploads, record_fetched, remote_of
from launcher.cli.continuation import Successor, ends_the_run, wait_for_the_next
from launcher.cli.deadlines import Deadlines
from launcher.cli.interrupts import Interrupts, NoInterrupts
from launcher.cli.run_follower import RunFollower
from launcher.cli.run_screen import Screen
from launcher.cli.unattended import DRIVER_ACTOR, Unattended, hide_webhook, same_command, typed_command
from launcher.config.foreign import OWN, SERVERS
from launcher.config.schema import RunConfig
from launcher.reporting.current_status import CurrentStatusFile
from launcher.resources.hardware import find_hardware
from launcher.resources.memory_history import MemoryHistory
from launcher.resources.run_plan import RunPlan
from launcher.resources.seen_memory import SeenMemory
from launcher.run_files import control_requests
from launcher.run_files.journal import Journal
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunLock, RunPaths

POLL_S = 0.25
ASK_AGAIN_S = 0.5
"""After an actor was not there: Ray restarts it in about a second."""


def run(
    config: RunConfig,
    *,
    server_entry: tuple[str, ...] | None = None,
    unattended: Unattended | None = None,
    successor: Successor | None = None,
    plan: RunPlan | None = None,
) -> int:
    """Run `config` to its end and return the exit code (docs/design.md).

    `server_entry`: in SGLang's place, for tests. `successor`: begins the next attempt, where one is to follow.
    `plan`: of its memory.
    Raises the UsageErrors that can be known before anything is started; later ones are the outcome.
    """
    known, killed = (None, None) if successor is None else (successor.known, successor.killed)
    interrupts = Interrupts() if unattended is None else NoInterrupts()
    if known is not None:
        interrupts = Interrupts(is_asked=known.is_asked, notified_at=known.notified_at)
        interrupts.listen_again()
    is_ours = config.trainer.adapter == OWN
    is_first = known is None and killed is None
    if is_first:
        _check(config)
    paths = RunPaths.of(config)
    paths.prepare()
    out = sys.stdout if unattended is None else unattended.out
    began, held = (None, None) if known is None else (known.screen_began, known.lock)
    with RunLock(paths, held=held) as lock, Screen(config, paths, out, began=began) as screen:
        with contextlib.nullcontext() if is_first else ends_the_run(paths, known):
            if not is_first:
                _check(config)
            remote = remote_of(config)
            prepared = find_prepared(config, paths)
            if prepared is None and (finished := already_finished(config, paths)):
                screen.line(finished)
                return EXIT_CODES[TerminalStatus.FINISHED]
            fetched = None if remote is None else fetch_if_empty(config, paths, remote)
            resume = resume_point(config, paths) if prepared is None and is_ours else None
            ServerKeys.make(paths.keys)
            hide_webhook(config, paths)
            if is_first and (unattended is None or not unattended.is_again):
                control_requests.forget(paths)
            name_run(paths)
            attempt = lock.next_attempt() if known is None else known.attempt
            written = screen.begin(attempt)
            journal = Journal(paths.events, attempt, time.time)
            if prepared is not None:
                screen.line(f"resuming from {prepared.name}, as it was set up")
                resume = take(prepared, paths, journal)
            if fetched is not None and remote is not None:
                screen.line(record_fetched(fetched, remote, journal))
            journal.record(
                "run.started",
                reason="resumed" if resume else "fresh",
                resume_from=str(resume or ""),
                command=same_command(unattended),
                folder=str(Path.cwd()),
                utc_offsets=local_offsets(time.time()),
                settings=written.name,
            )
        count = lock.next_attempt if successor else None
        restarts = ClusterRestarts(config, known=known, killed=killed, next_attempt=count)
        try:
            parts = (config, paths, journal, screen, server_entry, unattended, restarts, interrupts, plan)
            outcome = RunLaunch(*parts).run()
        except AttemptLost as lost:
            screen.leave()
            began_with = (known.settings if known else killed.settings if killed else "") or str(written)
            next_ = dataclasses.replace(lost.known, settings=began_with)
            (successor or Successor()).begin(next_, interrupts, screen_began=screen.began, lock=lock.descriptor)
        if remote is not None and (problem := finish_uploads(config, paths, remote, journal)):
            screen.line(problem)
        if outcome.status is TerminalStatus.FINISHED:
            with contextlib.suppress(OSError):  # the run is over, and says so
                InMemoryCheckpoints(paths).remove()  # its trainer may have been killed just before it would have
        screen.close(outcome)
        return EXIT_CODES[outcome.status] if outcome.exit_code is None else outcome.exit_code


def _check(config: RunConfig) -> None:
    for note in check_data(config) if config.trainer.adapter == OWN else ():
        print(f"note: {note}", file=sys.stderr)


class RunLaunch:
    """One attempt of a run, from the first actor to the outcome."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        journal: Journal,
        screen: Screen,
        server_entry: tuple[str, ...] | None = None,
        unattended: Unattended | None = None,
        restarts: ClusterRestarts | None = None,
        interrupts: Interrupts | None = None,
        plan: RunPlan | None = None,
    ) -> None:
        self._unattended = unattended
        self._config, self._paths = config, paths
        self._journal, self._screen = journal, screen
        self._server_entry = server_entry
        self._interrupts = interrupts or Interrupts()
        self._restarts = restarts or ClusterRestarts(config)
        self._now = CurrentStatusFile(
            paths, journal.attempt, address=config.cluster.address, is_detached=unattended is not None
        )
        memory = SeenMemory(plan, journal)
        self._deadlines = Deadlines(config, journal, self._interrupts, killed=self._restarts.killed)
        ends, reached = self._deadlines, self._restarts.reached
        self._shown = RunFollower(paths, journal, screen, self._now, memory, ends, reached=reached)
        self._actors: RunActors | ForeignActors | None = None

    def run(self) -> RunOutcome:
        """Raises AttemptLost where a successor is to resume; of what else a run can meet the outcome tells."""
        with self._interrupts, self._deadlines:
            try:
                outcome = self._supervised()
            except AttemptLost:
                raise
            except KeyboardInterrupt as error:
                why = "" if self._interrupts.asked else self._deadlines.reason
                reason = str(error) or why or "ended by the user, at once"
                outcome = RunOutcome(status=TerminalStatus.ABORTED, reason=reason)
            except LauncherError as error:
                code = (error if self._restarts.known is None else RunError).exit_code  # what began is not refused
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
        try:
            outcome = self._on_its_cluster()
            if outcome.status is not TerminalStatus.ERRORED or self._interrupts.asked:
                return outcome
            next_ = self._restarts.begin_anew(outcome, self._journal, self._paths)
            if isinstance(next_, RunOutcome):
                return next_
            raise self._told(next_)
        except AttemptLost as lost:
            wait_for_the_next(lost, self._interrupts, self._deadlines, meanwhile=self._now.write_if_due)
            raise

    def _on_its_cluster(self) -> RunOutcome:
        sglang, actor = self._config.sglang, self._config.actor
        cpus = sglang.n_servers * sglang.num_cpus + actor.dp_size * actor.num_cpus
        self._restarts.end_what_was_left()
        self._interrupts.spare_children()
        say, is_stopped = self._screen.milestone, self._is_stopped
        with ray_cluster(self._config, self._paths, num_cpus=cpus, say=say, is_stopped=is_stopped) as vital:
            self._interrupts.listen_again()
            self._restarts.record_restart(self._journal, self._paths)
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

    def _lost(self, lost: str, vital: VitalProcesses) -> AttemptLost:  # RunError, KeyboardInterrupt: the run ends
        end_supervisors(vital, self._paths, self._journal.attempt)
        if self._interrupts.asked:
            raise KeyboardInterrupt(f"ended by the user; {lost}")
        return self._told(self._restarts.begin(lost, self._journal, self._paths), vital.logs)

    def _told(self, again: AttemptLost, logs: Mapping[str, Path] = MappingProxyType({})) -> AttemptLost:
        self._shown.tell(again.began)
        asyncio.run(collect(self._paths, again.known.incident, facts=again.began, logs=logs, pids={}))
        return again

    def _create(self, vital: VitalProcesses | HeadWatch) -> Any:
        """All actors, each trivial until the Coordinator starts what it holds. Returns the Coordinator."""
        if self._config.trainer.adapter != OWN and self._config.trainer.rung != SERVERS:
            foreign = ForeignActors(self._config, self._paths, self._journal.attempt)
            self._actors = self._shown.actors = foreign
            return foreign.create()
        placed = self._place(vital)
        self._screen.milestone(f"starting {self._config.sglang.n_servers} SGLang server(s) and the trainer")
        history = MemoryHistory.of(self._config, self._paths.fileroot, find_hardware())
        kind = RunActors if self._config.trainer.adapter == OWN else ServedActors
        actors = kind(self._config, self._paths, self._journal.attempt, placed, self._server_entry)
        self._actors = self._shown.actors = actors
        return actors.create(history)

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
                coordinator.abort.remote("ended by the user")
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
                    self._shown.show(wait=True)
                    return outcome

    def _end_actors(self, *, is_reachable: bool) -> None:
        """Without Ray's own processes they end themselves, and asking would wait for an answer that never comes."""
        if is_reachable and self._actors is not None:
            self._actors.end()
        self._journal.record("run.stopped", reason="actors ended")
