"""Is a server, is the trainer, alive? HEALTHY | SUSPECT | DEAD | UNKNOWN, with the reason.

Whoever looks sees an exit at once, and a process that was stopped (SIGSTOP) and stays so: that is certain, whatever it
was doing. Any other hang is declared only when two of three witnesses agree:

    process   asleep though it has work
    answer    a real generation of one token is overdue
    tokens    requests wait and none of them gets a token

Each alone errs: a busy server answers late, a long generation shows nothing for minutes, a process sleeps because
its GPU works, or while a kernel is compiled for it. The health endpoint is no witness (200 with a dead detokenizer,
503 under load). Without recent evidence the answer is UNKNOWN, which is never healthy and never a reason to kill (P7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.base.messages import Cause, Health, Verdict
from launcher.base.wording import counted
from launcher.config.supervision import HealthConfig
from launcher.policy.observation_history import ServerEvidence, Task

LONE_PROBE_FACTOR = 5.0
"""Longer than with a client that waits: without one, two witnesses are the same probe, and one late answer would do."""
VOTES_FOR_A_HANG = 2


@dataclass(frozen=True, slots=True)
class Vote:
    """Of one witness. `stuck`: why it takes the server for stuck, "" where it doesn't; nor need it know it alive."""

    stuck: str = ""
    is_alive: bool = False


ABSTAINS = Vote()
ALIVE = Vote(is_alive=True)


def judge_server(evidence: ServerEvidence | None, settings: HealthConfig, now: float) -> Verdict:
    """The verdict on one incarnation of one server; None: nothing is known of it."""
    if evidence is None:
        return Verdict(health=Health.UNKNOWN, reason="never looked at")
    look = evidence.look
    if now - look.at > settings.proof_s:
        return Verdict(health=Health.UNKNOWN, reason=f"not looked at for {now - look.at:.1f} s")
    if evidence.stopped_s >= settings.stopped_s:
        reason = f"{', '.join(sorted(evidence.stopped))} stopped for {evidence.stopped_s:.1f} s"
        return Verdict(health=Health.DEAD, reason=reason, cause=Cause.SERVER_HANG)
    process = _process_vote(evidence, settings)
    answer, tokens = _generation_votes(evidence, settings, now)
    stuck = [vote.stuck for vote in (process, answer, tokens) if vote.stuck]
    reason = "; ".join(stuck)
    if len(stuck) >= VOTES_FOR_A_HANG:
        return Verdict(health=Health.DEAD, reason=reason, cause=Cause.SERVER_HANG)
    if process.stuck or (stuck and not (answer.is_alive or tokens.is_alive)):
        return Verdict(health=Health.SUSPECT, reason=reason)
    return _alive_or_unknown(evidence, settings, now, busy=reason)


def _process_vote(evidence: ServerEvidence, settings: HealthConfig) -> Vote:
    if evidence.frozen_s >= _silence_s(evidence, settings):
        return Vote(f"scheduler asleep for {evidence.frozen_s:.1f} s with work waiting")
    return ABSTAINS


def _generation_votes(evidence: ServerEvidence, settings: HealthConfig, now: float) -> tuple[Vote, Vote]:
    task = evidence.look.task
    if task is not None:
        return _votes_at_task(evidence, task, settings, now)
    return _answer_vote(evidence, settings, now), _tokens_vote(evidence, settings, now)


def _votes_at_task(evidence: ServerEvidence, task: Task, settings: HealthConfig, now: float) -> tuple[Vote, Vote]:
    """A server at a long task owes no token before its deadline, and one that makes some then is not stuck."""
    since_s = now - task.since
    if since_s < task.deadline_s:
        return ABSTAINS, ABSTAINS
    overdue = Vote(f"{task.name} for {since_s:.1f} s, more than {task.deadline_s:g} s")
    without_s = now - max(task.since, evidence.proof_at or task.since)
    is_dry = without_s >= _silence_s(evidence, settings)
    return overdue, Vote(f"no token for {without_s:.1f} s") if is_dry else ALIVE


def _answer_vote(evidence: ServerEvidence, settings: HealthConfig, now: float) -> Vote:
    silence_s = _silence_s(evidence, settings)
    if evidence.unanswered_s >= silence_s:
        failure = evidence.look.probe_failure
        return Vote(f"one-token generation unanswered for {evidence.unanswered_s:.1f} s{failure and f' ({failure})'}")
    return ALIVE if _is_within(silence_s, evidence.look.answered_at, now) else ABSTAINS


def _tokens_vote(evidence: ServerEvidence, settings: HealthConfig, now: float) -> Vote:
    silence_s = _silence_s(evidence, settings)
    if evidence.dry_s >= silence_s:
        return Vote(f"{counted(evidence.look.waiting, 'request')} without a token for {evidence.dry_s:.1f} s")
    # Where no client is known to wait, this witness is the same as the one before: it must wait longer to count. A
    # server that answers errors at once has a client waiting at one look, and none at the next.
    if evidence.barren_s >= silence_s * LONE_PROBE_FACTOR:
        return Vote(f"no token for anybody for {evidence.barren_s:.1f} s")
    return ALIVE if _is_within(silence_s, evidence.token_at, now) else ABSTAINS


def _silence_s(evidence: ServerEvidence, settings: HealthConfig) -> float:
    """The patience with this server: its own usual answer time shows how busy it is."""
    usual_s = evidence.look.usual_answer_s or 0.0
    return max(settings.silence_s, min(settings.silence_factor * usual_s, settings.silence_max_s))


def _is_within(seconds: float, at: float | None, now: float) -> bool:
    return at is not None and now - at <= seconds


def _alive_or_unknown(evidence: ServerEvidence, settings: HealthConfig, now: float, *, busy: str) -> Verdict:
    proof_at, task = evidence.proof_at, evidence.look.task
    if proof_at is not None and _is_within(settings.proof_s, proof_at, now):
        status = evidence.look.health_status
        doubts = [busy, f"health endpoint says {status}" if status not in (None, 200) else ""]
        reason = f"made a token {max(now - proof_at, 0.0):.1f} s ago"
        return Verdict(health=Health.HEALTHY, reason="; ".join(filter(None, [reason, *doubts])))
    if task is not None:
        reason = f"{task.name} for {now - task.since:.1f} s of at most {task.deadline_s:g} s"
    elif proof_at is None:
        reason = "no token seen yet" if math.isinf(evidence.dead_at) else "no token since it was found dead"
    else:
        reason = f"last token {now - proof_at:.1f} s ago"
    return Verdict(health=Health.UNKNOWN, reason=reason)
