"""Builds a plan: the actions ordered so far, and those that must not be ordered again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.base.messages import Cause, Overrides
from launcher.config.schema import RunConfig
from launcher.policy.actions import Action
from launcher.policy.checkpoint_status import CheckpointFacts
from launcher.policy.exit_cause import RanOut, least_fraction
from launcher.policy.memory_backoff import next_rung
from launcher.policy.observed import Observed
from launcher.policy.restart_budget import Repair, RepairAttempt, Rung, next_repair

NO_OVERRIDES: Overrides = {}
KEPT = "and nothing may give way (memory.give_way=false)"


@dataclass(slots=True, kw_only=True)
class PlanBuilder:
    """Once `halt_reason` is set, the plan is to halt; `may_pass`, `reinstate_after`: as of the action."""

    seen: Observed
    history: Sequence[RepairAttempt]
    config: RunConfig
    now: float
    actions: list[Action] = field(default_factory=list)
    attempts: list[RepairAttempt] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    wake_at: list[float] = field(default_factory=list)
    halt_reason: str = ""
    may_pass: bool = False
    reinstate_after: int | None = None
    needs_checkpoints: bool = False
    _kinds_by_name: set[tuple[type[Action], str]] = field(init=False)

    def __post_init__(self) -> None:
        self._kinds_by_name = {(type(action), getattr(action, "name", "")) for action in self.seen.under_way}

    def order(self, action: Action, *, reason: str = "", attempt: RepairAttempt | None = None) -> None:
        """Once: neither while the same is under way for the same subject, nor twice in a plan, nor at once after it
        failed."""
        name = getattr(action, "name", "")
        if self.does(type(action), name) or self.rests(type(action), name):
            return
        self.actions.append(action)
        self._kinds_by_name.add((type(action), name))
        self.reasons.append(reason or getattr(action, "reason", ""))
        if attempt is not None:
            self.attempts.append(attempt)

    def does(self, kind: type[Action], name: str = "") -> bool:
        """Is such an action ordered, or under way?"""
        return (kind, name) in self._kinds_by_name

    def has_failed(self, kind: type[Action], name: str = "") -> bool:
        """Such an action failed when it was last done."""
        return (kind, name) in self.seen.not_before

    def rests(self, kind: type[Action], name: str = "") -> bool:
        """Such an action failed a moment ago; the plan asks to be made again when it may be tried again."""
        not_before = self.seen.not_before.get((kind, name), self.now)
        if not_before > self.now:
            self.wake_at.append(not_before)
            self.reasons.append(f"{kind.__name__} {name}".strip() + f" failed: again in {not_before - self.now:.1f} s")
        return not_before > self.now

    def checkpoints(self) -> tuple[CheckpointFacts, ...] | None:
        """None while nobody has read them: the plan then asks for them, and nothing that needs them is ordered."""
        if self.seen.checkpoints is None:
            self.needs_checkpoints = True
            self.reasons.append("the checkpoints must be read first")
        return self.seen.checkpoints

    def halt(self, reason: str, *, may_pass: bool = False) -> None:
        """The first reason is the one that is told. It may pass where each of them may."""
        self.may_pass = may_pass and (self.may_pass or not self.halt_reason)
        self.halt_reason = self.halt_reason or reason

    def is_due(self, repair: Repair) -> bool:
        """May it begin? If not yet, the plan asks to be made again at its time."""
        if repair.not_before > self.now:
            self.wake_at.append(repair.not_before)
            self.reasons.append(f"{repair.reason}, in {repair.not_before - self.now:.1f} s")
            return False
        return True

    def wait_for_node(self, name: str, since: float, end: str) -> None:
        """`name` ended with its node, and Ray has found no other for it `since`: no restart brings any. `end`: its
        reason to halt, once cluster.node_wait_s is over."""
        give_up_at = since + self.config.cluster.node_wait_s
        if self.now < give_up_at:
            self.reasons.append(f"{name} waits for a node, up to cluster.node_wait_s")
            self.wake_at.append(give_up_at)
        else:
            self.halt(f"{end} for {self.now - since:.0f} s (cluster.node_wait_s)")

    def next_repair(
        self,
        cause: Cause,
        subject: str,
        *,
        progress_at: float | None,
        without: frozenset[Rung] = frozenset(),
        told: str = "",
    ) -> Repair:
        return next_repair(
            cause,
            subject,
            self.history,
            self.config.restart,
            now=self.now,
            progress_at=progress_at,
            without=without,
            told=told,
        )

    def must_keep_its_settings(self, ran_out: RanOut | None) -> bool:
        """Memory ran out, and nothing may give way: another try under the same settings would end alike."""
        return ran_out is not None and not self.config.memory.give_way

    def give_way(self, ran_out: RanOut | None, said: str = "") -> tuple[Overrides, str]:
        """The next rung of the memory ladder, and why; none where memory did not run out, or no rung is left.

        `said`: how the process ended, in which SGLang may name what it needs.
        """
        if ran_out is None:
            return NO_OVERRIDES, ""
        rung = next_rung(ran_out, self.seen.memory, self.seen.tried, self.config.memory, least_fraction(said))
        return rung.overrides, rung.reason

    def attempt(
        self,
        cause: Cause,
        subject: str,
        rung: Rung,
        *,
        onset_step: int | None = None,
        restored_step: int | None = None,
        told: str = "",
    ) -> RepairAttempt:
        return RepairAttempt(
            at=self.now,
            cause=cause,
            subject=subject,
            rung=rung,
            onset_step=onset_step,
            restored_step=restored_step,
            told=told,
        )
