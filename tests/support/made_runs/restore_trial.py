"""One made run under the real HealthMonitor and recovery plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from actors.monitoring.health_monitor import HealthMonitor
from actors.reward.recorded_answers import RecordedAnswers
from launcher.base.messages import Cause, Health, ServerState, Verdict
from launcher.config.schema import RunConfig
from launcher.policy.actions import (
    Halt,
    PauseTrainer,
    RestoreTrainer,
    ResumeTrainer,
)
from launcher.policy.admission import Admission, BatchReport
from launcher.policy.canary_policy import CanaryRound
from launcher.policy.checkpoint_status import CheckpointFacts, checkpoint_status
from launcher.policy.memory_backoff import MemorySettings
from launcher.policy.observed import Observed, RunState, ServerFacts, TrainerFacts, holds_damage
from launcher.policy.plan import plan
from launcher.policy.restart_budget import RepairAttempt
from launcher.policy.restore import first_damaged
from launcher.run_files.journal import Journal
from tests.support.made_runs.restore_world import PROMPTS, MadeRun

SAVE_EVERY = 5
STEPS_AFTER = 30
BATCHES = 600
"""The most of a run, rejected ones included."""
ALIVE = Verdict(health=Health.HEALTHY, reason="alive")


class Silent(Journal):
    """Keeps the names of events, and writes nothing."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, attempt=1)
        self.names: list[str] = []

    def record(self, event: str, /, **facts: object) -> dict[str, object]:
        self.names.append(event)
        return {}


@dataclass(kw_only=True)
class RestoreTrial:
    """One run under the real monitor and plan. `sound`: of each checkpoint that was ever committed."""

    run: MadeRun
    config: RunConfig
    monitor: HealthMonitor
    record: RecordedAnswers
    now: float = 0.0
    is_paused: bool = False
    lineage: int = 1
    furthest: int = -1
    shelf: dict[int, bool] = field(default_factory=dict)
    aside: dict[int, bool] = field(default_factory=dict)
    memory: dict[int, bool] = field(default_factory=dict)
    history: list[RepairAttempt] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)
    named: dict[str, int] = field(default_factory=dict)
    halt: str = ""

    def go(self) -> None:
        for _ in range(BATCHES):
            self.now += 1.0
            if not self.is_paused and self.run.step < self.run.onset + STEPS_AFTER:
                self._batch()
            elif not self.is_paused:
                return
            self._look()
            if self.halt:
                return

    # ── the trainer ──

    def _batch(self) -> None:
        rewards = self.run.batch_rewards()
        report, decision = self._ask(rewards)
        if decision.admitted:
            if not report.replayed and not report.canaries:
                ids = [f"prompt {self.run.step * PROMPTS + number}" for number in range(PROMPTS)]
                self.record.note(self.run.batch_of(rewards, ids), self.run.step)
            self.run.take_step()
            self._keep()
        elif decision.cause is not None:
            self._name(str(decision.cause) if decision.cause in SERVER_CAUSES else "")

    def _ask(self, rewards: Sequence[Sequence[float]]) -> tuple[BatchReport, Admission]:
        """As actors/training/admission_gate.py does."""
        every = [reward for group in rewards for reward in group]
        run, fault = self.run, self.run.fault
        is_far = run.has_begun and not run.is_mended
        report = BatchReport(
            policy_version=run.step,
            weight_versions=(run.step,),
            completions=len(every),
            without_reward=0,
            empty=0,
            nonfinite_logprobs=0,
            uneven_groups=0,
            global_step=run.step,
            mean_reward=sum(every) / len(every),
            low_reward=min(every),
            high_reward=max(every),
            logprob_distance=fault.distance if is_far else 1e-4,
            distances={"server-0": fault.distance if is_far else 1e-4},
            can_check=self.record.is_enough,
        )
        decision = self.monitor.admit(report)
        if decision.check_before is None:
            return report, decision
        rescored, replayed = self.record.check(decision.check_before, run.step)
        canaries = () if rescored is None else (rescored,)
        report = BatchReport(**asdict(report) | {"canaries": canaries, "replayed": replayed, "can_check": False})
        return report, self.monitor.admit(report)

    def _keep(self) -> None:
        step, is_sound = self.run.step - 1, self.run.damaged_since is None
        self.furthest = max(self.furthest, step)
        self.memory = {**{s: ok for s, ok in self.memory.items() if s == step - 1}, step: is_sound}
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            self.shelf[step] = is_sound

    # ── the Coordinator ──

    def _look(self) -> None:
        incident = self.monitor.report().incident
        if incident is not None:
            self._name(str(incident.cause))
        trainer = TrainerFacts(
            verdict=ALIVE,
            is_loaded=True,
            is_paused=self.is_paused,
            policy_version=self.run.step,
            lineage=self.lineage,
            next_step=self.run.step,
        )
        healthy_until = self.run.step - 1
        if incident is not None and (damaged := first_damaged(incident)) is not None:
            healthy_until = damaged - 1
        if incident is not None and incident.cause is Cause.VERIFIER_BROKEN and self.is_paused:
            if not holds_damage(incident, trainer):
                self._mend()
            incident = self.monitor.report().incident
        server = ServerFacts(
            name="server-0", state=ServerState.READY, verdict=ALIVE, weight_version=self.run.step, lineage=self.lineage
        )
        seen = Observed(
            state=RunState.RUNNING,
            servers=(server,),
            trainer=trainer,
            checkpoints=self._facts(healthy_until),
            memory=MemorySettings.of(self.config, longest_sequence=100, on_gpu=False, shares_gpu=False),
            incident=incident,
        )
        made = plan(seen, self.history, self.config, self.now)
        self.history += made.attempts
        for action in made.actions:
            match action:
                case PauseTrainer(save=save):
                    self.is_paused = True
                    if save:
                        self.shelf[self.run.step - 1] = self.run.damaged_since is None
                case ResumeTrainer():
                    self.is_paused = False
                case RestoreTrainer(global_step=step, onset_step=onset):
                    self._restore(step, onset)
                case Halt(reason=reason, reinstate_after=restored):
                    if restored is not None:
                        self.shelf |= self.aside
                        self.aside = {}
                    self.halt = reason
                case _:
                    raise AssertionError(f"not expected here: {action}")

    def _facts(self, healthy_until: int) -> tuple[CheckpointFacts, ...]:
        held = [(step, False) for step in self.shelf] + [(step, True) for step in self.memory if step not in self.shelf]
        return tuple(
            CheckpointFacts(
                global_step=step,
                status=checkpoint_status(step, healthy_until=healthy_until, settings=self.config.restore).status,
                in_memory=in_memory,
            )
            for step, in_memory in held
        )

    def _set_aside(self, after: int) -> None:
        self.aside |= {step: ok for step, ok in self.shelf.items() if step > after}
        self.shelf = {step: ok for step, ok in self.shelf.items() if step <= after}
        self.memory = {step: ok for step, ok in self.memory.items() if step <= after}

    def _restore(self, step: int, onset: int | None) -> None:
        self.restored.append(step)
        self._set_aside(step)
        self.run.restore(step)
        self.lineage += 1
        self.monitor.restored(step, onset)

    def _mend(self) -> None:
        """A person repairs the reward function; known answers are asked again until they are believed."""
        self.run.is_mended = True
        for _ in range(self.config.reward_health.canary_clear_rounds):
            rescored = self.record.rescore()
            scores = () if rescored is None else (rescored,)
            self.monitor.canaries(CanaryRound(step=self.run.step, scores=scores))

    def _name(self, cause: str) -> None:
        if cause:
            self.named.setdefault(cause, self.run.step - self.run.onset)
            if cause in map(str, SERVER_CAUSES):
                self.halt = "the server is restarted, which is not part of this"


SERVER_CAUSES = frozenset({Cause.SERVER_STALE, Cause.SERVER_CORRUPT})
