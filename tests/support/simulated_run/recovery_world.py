"""A small model of a run under the plan's hand: servers, trainer, checkpoints, and actions that take time and may fail.

It knows the truth (which weights are damaged, which server holds what), checks each plan against it, and shows the
plan only what a Coordinator could observe. One tick is one second; in each the trainer makes one step if it can.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from launcher.base.messages import Cause, Health, Incident, ServerState, TerminalStatus, Verdict
from launcher.policy.actions import (
    AbandonServer,
    Action,
    AdmitServer,
    Halt,
    LoadWeights,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
)
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus, checkpoint_status
from launcher.policy.exit_cause import RanOut
from launcher.policy.memory_backoff import MemorySettings, TriedSettings
from launcher.policy.observed import Observed, RecoveryPlan, ServerFacts, TrainerFacts
from launcher.policy.recovery import plan
from launcher.policy.restart_budget import RepairAttempt
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.policy.run_state import ENDS, RunState, transition
from tests.support.simulated_run.plan_truth import check_plan
from tests.support.simulated_run.recovery_parts import (
    ALIVE,
    CONFIG,
    SAVE_EVERY,
    SECONDS,
    SEEN_AFTER,
    STARTING,
    TOTAL_STEPS,
    Doing,
    Server,
    Trainer,
)


@dataclass
class World:
    """`servers_die_at_start`, `trainer_dies_at_step`, `collapses_at_step`: faults that no repair removes."""

    servers: list[Server] = field(default_factory=lambda: [Server("s0"), Server("s1")])
    trainer: Trainer = field(default_factory=Trainer)
    state: RunState = RunState.INITIALIZING
    now: float = 100.0
    checkpoints: dict[int, CheckpointFacts] = field(default_factory=dict)
    damaged_checkpoints: set[int] = field(default_factory=set)
    rewards_fell: dict[int, bool] = field(default_factory=dict)  # of the steps that stand
    doing: list[Doing] = field(default_factory=list)
    history: list[RepairAttempt] = field(default_factory=list)
    tried: list[TriedSettings] = field(default_factory=list)
    memory: MemorySettings = field(
        default_factory=lambda: MemorySettings.of(CONFIG, longest_sequence=600, on_gpu=True, shares_gpu=True)
    )
    highest_step: int = -1
    progress_at: float | None = None
    verifier_broke_at: tuple[float, int] | None = None
    abort_reason: str = ""
    ending: TerminalStatus | None = None
    is_stopped: bool = False
    fail_next: bool = False
    servers_die_at_start: frozenset[str] = frozenset()
    trainer_dies_at_step: int | None = None
    collapses_at_step: int | None = None
    plans: list[RecoveryPlan] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)

    # ── one second ──

    def tick(self) -> None:
        """Finish what is due, step if possible, look, plan, begin."""
        self.now += 1.0
        for doing in [d for d in self.doing if d.ends_at <= self.now]:
            self.doing.remove(doing)
            if not doing.fails:
                self._take_effect(doing.action)
        self._step()
        self._certify()
        seen = self.observe()
        made = plan(seen, self.history, CONFIG, self.now)
        assert plan(seen, self.history, CONFIG, self.now) == made, "the same look gave another plan"
        check_plan(self, seen, made)
        self.plans.append(made)
        self.state = transition(self.state, made.state)
        self.history += made.attempts
        for action in made.actions:
            self._begin(action)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDS

    def run(self, seconds: int) -> RunState:
        for _ in range(seconds):
            if self.has_ended:
                break
            self.tick()
        return self.state

    def observe(self) -> Observed:
        return Observed(
            state=self.state,
            servers=tuple(self._server_facts(server) for server in self.servers),
            trainer=self._trainer_facts(),
            checkpoints=tuple(self.checkpoints.values()),
            memory=self.memory,
            incident=self._incident(),
            under_way=tuple(doing.action for doing in self.doing),
            tried=tuple(self.tried),
            progress_at=self.progress_at,
            abort_reason=self.abort_reason,
            ending=self.ending,
            is_stopped=self.is_stopped,
        )

    def _server_facts(self, server: Server) -> ServerFacts:
        if server.cause is not None and server.state in (ServerState.DEAD, ServerState.FAILED):
            verdict = Verdict(health=Health.DEAD, reason="dead", cause=server.cause)
        elif server.cause is not None:
            verdict = Verdict(health=Health.SUSPECT, reason="wrong weights", cause=server.cause)
        else:
            verdict = STARTING if server.state is ServerState.STARTING else ALIVE
        version, lineage = server.weights or (None, None)
        return ServerFacts(
            name=server.name,
            state=server.state,
            verdict=verdict,
            weight_version=version,
            lineage=lineage,
            ran_out=server.ran_out,
            progress_at=server.progress_at,
        )

    def _trainer_facts(self) -> TrainerFacts:
        trainer = self.trainer
        verdict = Verdict(health=Health.DEAD, reason="dead", cause=trainer.cause) if trainer.cause else ALIVE
        return TrainerFacts(
            verdict=verdict,
            is_loaded=trainer.is_loaded,
            is_paused=trainer.is_paused,
            policy_version=trainer.next_step,
            lineage=trainer.lineage,
            next_step=trainer.next_step,
            is_finished=trainer.next_step >= TOTAL_STEPS and trainer.is_loaded and trainer.cause is None,
            ran_out=trainer.ran_out,
        )

    def _incident(self) -> Incident | None:
        if self.verifier_broke_at is not None:
            since, step = self.verifier_broke_at
            return Incident(
                cause=Cause.VERIFIER_BROKEN, subject="reward", reason="canary", since=since, onset_step=step
            )
        fell = [step for step, bad in self.rewards_fell.items() if bad]
        if len(fell) < SEEN_AFTER:
            return None
        return Incident(
            cause=Cause.REWARD_COLLAPSE, subject="policy", reason="fell", since=self.now, onset_step=min(fell)
        )

    # ── what happens by itself ──

    def _can_step(self) -> bool:
        trainer = self.trainer
        busy = any(isinstance(d.action, RestoreTrainer | RestartTrainer) for d in self.doing)
        return (
            trainer.cause is None
            and trainer.is_loaded
            and not trainer.is_paused
            and not busy
            and self.verifier_broke_at is None  # the gate
            and trainer.next_step < TOTAL_STEPS
            and bool(self.serving())
        )

    def serving(self) -> list[Server]:
        current = (self.trainer.next_step, self.trainer.lineage)
        return [s for s in self.servers if s.state is ServerState.READY and s.weights == current]

    def _step(self) -> None:
        if not self._can_step():
            return
        trainer, step, serving = self.trainer, self.trainer.next_step, self.serving()
        if step == self.trainer_dies_at_step:
            self.crash_trainer(Cause.TRAINER_CRASH)
            return
        self.trained.append(step)
        self.rewards_fell[step] = trainer.is_damaged
        trainer.is_damaged |= step == self.collapses_at_step
        trainer.next_step += 1
        for server in self.servers:
            if server.state in (ServerState.READY, ServerState.STALE) and server.weights == (step, trainer.lineage):
                server.weights = (step + 1, trainer.lineage)
        if step > self.highest_step:
            self.highest_step, self.progress_at = step, self.now
            for server in serving:
                server.progress_at = self.now
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            self.checkpoints[step] = CheckpointFacts(global_step=step, status=CheckpointStatus.CANDIDATE)
            self.damaged_checkpoints.discard(step)
            if trainer.is_damaged:
                self.damaged_checkpoints.add(step)

    def _certify(self) -> None:
        if self._incident() is None:
            for step, saved in self.checkpoints.items():
                if saved.status is CheckpointStatus.CANDIDATE:
                    judged = checkpoint_status(step, healthy_until=self.trainer.next_step - 1, settings=CONFIG.restore)
                    self.checkpoints[step] = dataclasses.replace(saved, status=judged.status)

    # ── actions ──

    def _begin(self, action: Action) -> None:
        fails, self.fail_next = self.fail_next and not isinstance(action, Halt), False
        if isinstance(action, Halt):
            self.ending = action.word
        if isinstance(action, RestartServer | RestartTrainer) and action.overrides:
            where = self._ran_out_of(action)
            if where is not None:
                self.tried.append(TriedSettings(ran_out=where, settings=self.memory))
            self.memory = self.memory.changed(action.overrides)
        self.doing.append(Doing(action=action, ends_at=self.now + SECONDS[type(action)], fails=fails))
        if SECONDS[type(action)] == 0:
            doing = self.doing.pop()
            if not doing.fails:
                self._take_effect(action)

    def _ran_out_of(self, action: RestartServer | RestartTrainer) -> RanOut | None:
        return self.server(action.name).ran_out if isinstance(action, RestartServer) else self.trainer.ran_out

    def server(self, name: str) -> Server:
        return next(server for server in self.servers if server.name == name)

    def _take_effect(self, action: Action) -> None:
        trainer = self.trainer
        match action:
            case Halt():
                self.is_stopped = True
            case RestartServer(name=name):
                server = self.server(name)
                server.state, server.cause, server.ran_out, server.weights = ServerState.STALE, None, None, None
                if name in self.servers_die_at_start:
                    self.crash_server(name, Cause.SERVER_CRASH)
            case AbandonServer(name=name):
                self.server(name).state = ServerState.FAILED
            case LoadWeights(name=name, lineage=lineage):
                server = self.server(name)
                if server.state in (ServerState.STALE, ServerState.READY) and lineage == trainer.lineage:
                    server.weights, server.cause, server.state = (trainer.next_step, lineage), None, ServerState.STALE
            case AdmitServer(name=name):
                server = self.server(name)
                if server.state is ServerState.STALE:
                    server.state = ServerState.READY
            case RestartTrainer():
                self.trainer = Trainer(lineage=trainer.lineage, next_step=trainer.next_step)
            case _ if trainer.cause is not None:
                pass  # it died meanwhile
            case PauseTrainer():
                trainer.is_paused = True
            case ResumeTrainer():
                trainer.is_paused = False
            case RestoreTrainer(global_step=step, condemn_after=after):
                if after is not None:
                    self._condemn(after)
                self._restore(step)

    def _condemn(self, after: int) -> None:
        for step, saved in self.checkpoints.items():
            if step > after:
                self.checkpoints[step] = dataclasses.replace(saved, status=CheckpointStatus.CONDEMNED)

    def _restore(self, step: int) -> None:
        if step != FIRST_WEIGHTS and not self.checkpoints[step].is_complete:
            return
        self.trainer = Trainer(
            is_loaded=True,
            next_step=step + 1,
            lineage=self.trainer.lineage + 1,
            is_damaged=step in self.damaged_checkpoints,
        )
        self.rewards_fell = {s: bad for s, bad in self.rewards_fell.items() if s <= step}
        self.checkpoints = {s: saved for s, saved in self.checkpoints.items() if s <= step}

    # ── faults ──

    def begin(self) -> None:
        """As the driver does: every process starts."""
        for server in self.servers:
            server.state = ServerState.STALE

    def crash_server(self, name: str, cause: Cause, ran_out: RanOut | None = None) -> None:
        server = self.server(name)
        server.state, server.cause, server.ran_out, server.weights = ServerState.DEAD, cause, ran_out, None

    def crash_trainer(self, cause: Cause, ran_out: RanOut | None = None) -> None:
        self.trainer.cause, self.trainer.ran_out = cause, ran_out

    def drop_load(self, name: str) -> None:
        server = self.server(name)
        if server.weights is not None:
            server.weights = (server.weights[0] - 1, server.weights[1])

    def sleep_through_a_restore(self, name: str) -> None:
        """It shows the right version number, of weights that are no more."""
        server = self.server(name)
        if server.weights is not None:
            server.weights = (self.trainer.next_step, server.weights[1] - 1)

    def corrupt(self, name: str) -> None:
        server = self.server(name)
        if server.state is ServerState.READY:
            server.cause = Cause.SERVER_CORRUPT

    def tear_newest_checkpoint(self) -> None:
        if self.checkpoints:
            newest = max(self.checkpoints)
            self.checkpoints[newest] = dataclasses.replace(self.checkpoints[newest], is_complete=False)
