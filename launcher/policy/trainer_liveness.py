"""Is the trainer alive? Dead when its process has exited, or it makes no progress for many of its own steps.

A trainer is not asked to generate, so no probe gives a reliable answer in seconds: a checkpoint or a large
kernel may hold the interpreter for long. Only one that is stopped *and* doesn't answer is condemned early.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from statistics import median

from launcher.base.messages import Cause, Health, Verdict
from launcher.config.supervision import HealthConfig
from launcher.policy.observation_history import LONGEST_GAP, STOPPED

STEPS_KEPT = 20
MOST_BETWEEN_LOOKS_S = 5.0
"""Of a longer time nobody knows what was in it: the machine may have been suspended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLook:
    """What was seen of the trainer at one moment.

    `state`: its state letter in /proc, None where it could not be seen. `cpu_s`: CPU seconds used. `pinged_at`: its
    last answer; `ping_waits`: another has been asked for. `progress`: any number that changes while it gets on
    (phases entered, completions received, micro-batches done). `waits_for`: what it waits for by order or for want
    of a server, "" where it has work; meanwhile it owes no progress. `median_step_s`: of its own steps.
    `is_at_one_thing`: a checkpoint, the first weights that its process publishes, or weights on their way to servers,
    which no step before may have had and which shows no progress until it is done.
    """

    at: float
    state: str | None
    cpu_s: float = 0.0
    pinged_at: float | None = None
    ping_waits: bool = False
    progress: int = 0
    waits_for: str = ""
    median_step_s: float | None = None
    is_at_one_thing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerEvidence:
    """One incarnation of the trainer so far; seconds count as in launcher/policy/observation_history.py."""

    look: TrainerLook
    stopped_s: float = 0.0
    unanswered_s: float = 0.0
    idle_s: float = 0.0
    progress_at: float | None = None


def observe_trainer(evidence: TrainerEvidence, look: TrainerLook, settings: HealthConfig) -> TrainerEvidence:
    """The evidence with one more look. For a new incarnation begin with `TrainerEvidence(look=…)`."""
    before = evidence.look
    looked_s = min(max(look.at - before.at, 0.0), LONGEST_GAP * settings.look_interval_s)
    is_stopped = look.state == STOPPED and look.cpu_s <= before.cpu_s
    moved = look.progress != before.progress
    return replace(
        evidence,
        look=look,
        stopped_s=evidence.stopped_s + looked_s if is_stopped else 0.0,
        unanswered_s=evidence.unanswered_s + looked_s
        if look.ping_waits and look.pinged_at == before.pinged_at
        else 0.0,
        idle_s=0.0 if moved or look.waits_for else evidence.idle_s + looked_s,
        progress_at=look.at if moved else evidence.progress_at,
    )


def judge_trainer(evidence: TrainerEvidence | None, settings: HealthConfig, now: float) -> Verdict:
    """The verdict on one incarnation of the trainer; None: nothing is known of it."""
    if evidence is None:
        return Verdict(health=Health.UNKNOWN, reason="never looked at")
    look = evidence.look
    if now - look.at > settings.proof_s:
        return Verdict(health=Health.UNKNOWN, reason=f"not looked at for {now - look.at:.1f} s")
    limit_s = progress_limit_s(None if look.is_at_one_thing else look.median_step_s, settings)
    is_stopped = evidence.stopped_s >= settings.trainer_silence_s
    is_mute = evidence.unanswered_s >= settings.trainer_silence_s
    seen = {
        f"stopped for {evidence.stopped_s:.1f} s": is_stopped,
        f"does not answer for {evidence.unanswered_s:.1f} s": is_mute,
        f"no progress for {evidence.idle_s:.1f} s, more than {limit_s:.0f} s": evidence.idle_s >= limit_s,
    }
    reason = "; ".join(text for text, holds in seen.items() if holds)
    if evidence.idle_s >= limit_s or (is_stopped and is_mute):
        return Verdict(health=Health.DEAD, reason=reason, cause=Cause.TRAINER_HANG)
    if reason:
        return Verdict(health=Health.SUSPECT, reason=reason)
    return _alive_or_unknown(evidence, settings, now)


def progress_limit_s(median_step_s: float | None, settings: HealthConfig) -> float:
    """For how long a trainer with work may show no progress. None: its steps are no measure of what it is doing."""
    if median_step_s is None:
        return settings.trainer_first_s
    return max(settings.trainer_min_s, settings.trainer_factor * median_step_s)


def _alive_or_unknown(evidence: TrainerEvidence, settings: HealthConfig, now: float) -> Verdict:
    proofs = [at for at in (evidence.look.pinged_at, evidence.progress_at) if at is not None]
    if not proofs:
        return Verdict(health=Health.UNKNOWN, reason="has not answered yet")
    age_s = max(now - max(proofs), 0.0)
    if age_s > settings.proof_s:
        return Verdict(health=Health.UNKNOWN, reason=f"last sign of life {age_s:.1f} s ago")
    waits = f", waits for {evidence.look.waits_for}" if evidence.look.waits_for else ""
    return Verdict(health=Health.HEALTHY, reason=f"sign of life {age_s:.1f} s ago{waits}")


class StepClock:
    """Says when a run that works takes no step for far longer than usual, and when one came after all.

    For what no detector knows: nothing is repaired for it, but a person hears of it.
    """

    def __init__(self, settings: HealthConfig) -> None:
        self._settings = settings
        self._durations: deque[float] = deque(maxlen=STEPS_KEPT)
        self._next_step = -1
        self._at = 0.0
        self._waited_s = 0.0
        self.is_late = False

    def note(self, next_step: int, *, is_working: bool, now: float) -> str:
        """What began or ended to be so with this look, "" for nothing. Only time in which the run worked counts: it is
        not repaired, paused or evaluated; nor does what nobody looked at."""
        waited_s = self._waited_s
        self._waited_s = 0.0
        elapsed_s = min(now - self._at, MOST_BETWEEN_LOOKS_S) if is_working and self._next_step >= 0 else 0.0
        steps = next_step - self._next_step
        self._next_step = next_step
        self._at = now
        if steps == 0:
            self._waited_s = waited_s + elapsed_s
            return self._became_late()
        if steps > 0 and waited_s > 0:
            self._durations.append((waited_s + elapsed_s) / steps)
        was_late = self.is_late
        self.is_late = False
        what = "a step came" if steps > 0 else "the trainer was taken back"
        return f"{what} after {waited_s + elapsed_s:.0f} s" if was_late else ""

    def _became_late(self) -> str:
        usual_s = median(self._durations) if self._durations else None
        if self.is_late or self._waited_s < progress_limit_s(usual_s, self._settings):
            return ""
        self.is_late = True
        usually = "" if usual_s is None else f", usually one takes {usual_s:.1f} s"
        return f"no step for {self._waited_s:.0f} s{usually}, and no cause is known"
