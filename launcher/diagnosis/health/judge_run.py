"""Is a run healthy? What was seen of it goes in, findings come out; who looks is scripts/health/look_run.py."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.diagnosis.health.finding import CheckResult, Finding

STALL_FACTOR, STALL_MIN_S = 10.0, 60.0
"""No step for so many usual ones, and for so long, is a run that stands."""
ZERO_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeen:
    """`is_live` None: its driver is on another machine. `word` "" while it has not said its last one."""

    is_live: bool | None
    word: str
    reason: str
    state: str
    state_reason: str
    open_incidents: tuple[str, ...]
    last_step: int | None
    total_steps: int | None
    since_step_s: float | None
    usual_step_s: float | None
    last_rewards: tuple[float, ...]


def judge_run(seen: RunSeen) -> list[Finding]:
    if seen.word:
        verdict = CheckResult.OK if seen.word == "FINISHED" else CheckResult.BAD
        return [_run("state", verdict, f"{seen.word}: {seen.reason}", seen)]
    if seen.is_live is False:
        said = "its driver is gone and wrote no last word; the same command resumes it"
        return [_run("state", CheckResult.BAD, said, seen)]
    if seen.is_live is None:
        return [
            _run("state", CheckResult.UNKNOWN, f"{seen.state} by its journal; its driver is on another machine", seen)
        ]
    return [_judge_state(seen), *_judge_steps(seen)]


def _judge_state(seen: RunSeen) -> Finding:
    if seen.open_incidents:
        return _run("state", CheckResult.BAD, f"{seen.state}: {'; '.join(seen.open_incidents)}", seen)
    if seen.state == "RUNNING":
        return _run("state", CheckResult.OK, _progress(seen), seen)
    if seen.state in ("", "INITIALIZING"):
        return _run("state", CheckResult.UNKNOWN, "it is still starting", seen)
    why = f": {seen.state_reason}" if seen.state_reason else ""
    return _run("state", CheckResult.BAD, f"{seen.state}{why}", seen)


def _progress(seen: RunSeen) -> str:
    total = f" of {seen.total_steps}" if seen.total_steps else ""
    done = 0 if seen.last_step is None else seen.last_step + 1
    return f"RUNNING, {done}{total} steps are done"


def _judge_steps(seen: RunSeen) -> list[Finding]:
    found = []
    if seen.since_step_s is not None and seen.usual_step_s is not None and seen.state == "RUNNING":
        limit_s = max(STALL_FACTOR * seen.usual_step_s, STALL_MIN_S)
        said = f"the last step was {seen.since_step_s:.0f} s ago, one usually takes {seen.usual_step_s:.1f} s"
        verdict = CheckResult.OK if seen.since_step_s <= limit_s else CheckResult.BAD
        found.append(_run("steps", verdict, said, seen))
    if seen.last_rewards:
        mean = sum(seen.last_rewards) / len(seen.last_rewards)
        zeros = len(seen.last_rewards) >= ZERO_STEPS and not any(seen.last_rewards[-ZERO_STEPS:])
        said = f"mean of {mean:.3f} over the last {len(seen.last_rewards)} steps"
        said = f"0 in each of the last {ZERO_STEPS} steps" if zeros else said
        found.append(_run("reward", CheckResult.BAD if zeros else CheckResult.OK, said, seen))
    return found


def _run(subject: str, verdict: CheckResult, said: str, seen: RunSeen) -> Finding:
    facts = {
        "word": seen.word,
        "state": seen.state,
        "is_live": seen.is_live,
        "last_step": seen.last_step,
        "since_step_s": seen.since_step_s,
        "usual_step_s": seen.usual_step_s,
    }
    return Finding(check="run", subject=subject, verdict=verdict, said=said, facts=facts)
