"""Is it healthy? Pure: what was seen goes in, findings come out. Whoever looks is in scripts/health."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.health.finding import Finding, Verdict

GIB = 2.0**30
MEMORY_BAD, MEMORY_NOTE = 0.95, 0.85
STALL_FACTOR, STALL_MIN_S = 10.0, 60.0
"""No step for so many usual ones, and for so long, is a run that stands."""
ZERO_STEPS = 5
FEW_CHECKPOINTS = 3


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
        verdict = Verdict.OK if seen.word == "FINISHED" else Verdict.BAD
        return [_run("state", verdict, f"{seen.word}: {seen.reason}", seen)]
    if seen.is_live is False:
        said = "its driver is gone and wrote no last word; the same command resumes it"
        return [_run("state", Verdict.BAD, said, seen)]
    if seen.is_live is None:
        return [_run("state", Verdict.UNKNOWN, f"{seen.state} by its journal; its driver is on another machine", seen)]
    return [_judge_state(seen), *_judge_steps(seen)]


def _judge_state(seen: RunSeen) -> Finding:
    if seen.open_incidents:
        return _run("state", Verdict.BAD, f"{seen.state}: {'; '.join(seen.open_incidents)}", seen)
    if seen.state == "RUNNING":
        return _run("state", Verdict.OK, _progress(seen), seen)
    if seen.state in ("", "INITIALIZING"):
        return _run("state", Verdict.UNKNOWN, "it is still starting", seen)
    why = f": {seen.state_reason}" if seen.state_reason else ""
    return _run("state", Verdict.BAD, f"{seen.state}{why}", seen)


def _progress(seen: RunSeen) -> str:
    total = f" of {seen.total_steps}" if seen.total_steps else ""
    done = 0 if seen.last_step is None else seen.last_step + 1
    return f"RUNNING, {done}{total} steps are done"


def _judge_steps(seen: RunSeen) -> list[Finding]:
    found = []
    if seen.since_step_s is not None and seen.usual_step_s is not None and seen.state == "RUNNING":
        limit_s = max(STALL_FACTOR * seen.usual_step_s, STALL_MIN_S)
        said = f"the last step was {seen.since_step_s:.0f} s ago, one usually takes {seen.usual_step_s:.1f} s"
        verdict = Verdict.OK if seen.since_step_s <= limit_s else Verdict.BAD
        found.append(_run("steps", verdict, said, seen))
    if seen.last_rewards:
        mean = sum(seen.last_rewards) / len(seen.last_rewards)
        zeros = len(seen.last_rewards) >= ZERO_STEPS and not any(seen.last_rewards[-ZERO_STEPS:])
        said = f"mean of {mean:.3f} over the last {len(seen.last_rewards)} steps"
        said = f"0 in each of the last {ZERO_STEPS} steps" if zeros else said
        found.append(_run("reward", Verdict.BAD if zeros else Verdict.OK, said, seen))
    return found


def _run(subject: str, verdict: Verdict, said: str, seen: RunSeen) -> Finding:
    facts = {
        "word": seen.word,
        "state": seen.state,
        "is_live": seen.is_live,
        "last_step": seen.last_step,
        "since_step_s": seen.since_step_s,
        "usual_step_s": seen.usual_step_s,
    }
    return Finding(check="run", subject=subject, verdict=verdict, said=said, facts=facts)


# ── a server ──


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSeen:
    """`said_state` is the journal's word: READY, STARTING, DEAD, ABANDONED. `process` is the worst letter of proc(5) of
    its processes, "" where they are gone, None where they can't be seen from here. What was not answered is None.

    `expected`: weight versions that are current, from the trainer's before the questions to its after them.
    """

    name: str
    said_state: str
    url: str
    process: str | None
    weight_version: int | None
    expected: tuple[int, int] | None
    generated_s: float | None
    failure: str
    running: float | None
    queued: float | None
    kv_use: float | None


def judge_server(seen: ServerSeen) -> Finding:
    verdict, said = _server_verdict(seen)
    facts = {
        "state": seen.said_state,
        "url": seen.url,
        "process": seen.process,
        "weight_version": seen.weight_version,
        "expected": seen.expected,
        "generated_s": seen.generated_s,
        "running": seen.running,
        "queued": seen.queued,
        "kv_use": seen.kv_use,
        "failure": seen.failure,
    }
    return Finding(check="servers", subject=seen.name, verdict=verdict, said=said, facts=facts)


def _server_verdict(seen: ServerSeen) -> tuple[Verdict, str]:
    match seen.said_state:
        case "ABANDONED":
            return Verdict.BAD, "given up; the run goes on without it"
        case "STARTING":
            return Verdict.UNKNOWN, "it is starting"
        case "DEAD":
            return Verdict.BAD, "it died, and has not been started anew yet"
    if seen.process == "":
        return Verdict.BAD, "its process is gone"
    if seen.process in ("T", "t", "Z"):
        return Verdict.BAD, "a process of it is stopped" if seen.process != "Z" else "a process of it has ended"
    if seen.generated_s is None:
        return _silent(seen)
    if seen.expected and seen.weight_version is not None and not _is_current(seen):
        low, high = seen.expected
        wanted = str(low) if low == high else f"{low} or {high}"
        return Verdict.BAD, f"it holds weight_version {seen.weight_version}, the trainer is at {wanted}"
    return Verdict.OK, f"a token in {seen.generated_s:.2f} s{_load(seen)}, weight_version {seen.weight_version}"


def _silent(seen: ServerSeen) -> tuple[Verdict, str]:
    """A server that is busy with other requests may keep one that asks for a token waiting: nobody knows then."""
    if seen.running:
        return Verdict.UNKNOWN, f"no token of its own, while it says that it is busy{_load(seen)}: {seen.failure}"
    if seen.weight_version is not None:
        return Verdict.BAD, f"it answers and generates nothing: {seen.failure}"
    return Verdict.BAD, seen.failure or "no answer"


def _is_current(seen: ServerSeen) -> bool:
    assert seen.expected is not None
    return seen.weight_version is not None and seen.expected[0] <= seen.weight_version <= seen.expected[1]


def _load(seen: ServerSeen) -> str:
    parts = [
        f"{value:.0f} {name}"
        for value, name in ((seen.running, "running"), (seen.queued, "queued"))
        if value is not None
    ]
    parts += [f"KV cache {seen.kv_use:.0%} used"] if seen.kv_use is not None else []
    return f", {', '.join(parts)}" if parts else ""


# ── memory, room ──


def judge_memory(name: str, used: float, limit: float) -> Finding:
    share = used / limit if limit > 0 else 1.0
    verdict = Verdict.BAD if share >= MEMORY_BAD else Verdict.NOTE if share >= MEMORY_NOTE else Verdict.OK
    said = f"{used / GIB:.1f} of {limit / GIB:.1f} GiB used ({share:.0%})"
    return Finding(
        check="memory", subject=name, verdict=verdict, said=said, facts={"used_bytes": used, "limit_bytes": limit}
    )


def judge_room(folder: str, free: int, sizes: Sequence[int]) -> Finding:
    """`sizes`: bytes of the last checkpoints. The next one is written before an old one goes."""
    facts: dict[str, object] = {"free_bytes": free, "checkpoint_bytes": max(sizes, default=None), "fits": None}
    if not sizes:
        said = f"{free / GIB:.1f} GiB free in {folder}; no checkpoint yet to take the size of"
        return Finding(check="disk", subject="checkpoints", verdict=Verdict.NOTE, said=said, facts=facts)
    fits = free // max(*sizes, 1)
    verdict = Verdict.BAD if fits < 1 else Verdict.NOTE if fits < FEW_CHECKPOINTS else Verdict.OK
    said = f"{free / GIB:.1f} GiB free in {folder}: {fits:,} more checkpoints of {_size(max(sizes))} fit"
    return Finding(check="disk", subject="checkpoints", verdict=verdict, said=said, facts=facts | {"fits": int(fits)})


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


# ── kills for memory ──


@dataclass(frozen=True, slots=True, kw_only=True)
class KillsSeen:
    """`kills` are (unix time, pid, name) from the kernel's log, None where it can't be read. `count`: the kernel's own
    counter since boot. The attempt ran from `since` to `until`; `own_pids` are its processes, `ran_out` the journal's
    words on memory that ran out in it."""

    kills: tuple[tuple[float, int, str], ...] | None
    count: int
    since: float
    until: float
    own_pids: frozenset[int]
    ran_out: tuple[str, ...]
    deaths: int
    is_live: bool


def judge_kills(seen: KillsSeen) -> Finding:
    facts = {"oom_kill": seen.count, "ran_out": list(seen.ran_out)}
    own = [kill for kill in seen.kills or () if kill[1] in seen.own_pids]
    others = [kill for kill in seen.kills or () if seen.since <= kill[0] <= seen.until]
    if own:
        _, pid, name = own[-1]
        said = f"the kernel killed {len(own)} of this run's processes for memory, the last one {name} (pid {pid})"
        return _kills(Verdict.NOTE if seen.is_live else Verdict.BAD, said, facts)
    if seen.ran_out:
        said = f"memory ran out {len(seen.ran_out)} times in this attempt, the last time {seen.ran_out[-1]}"
        return _kills(Verdict.NOTE if seen.is_live else Verdict.BAD, said, facts)
    if others:
        _, pid, name = others[-1]
        return _kills(Verdict.NOTE, f"{len(others)} while it ran, none of this run: {name} (pid {pid})", facts)
    if seen.kills is None and seen.count and seen.deaths:
        said = f"{seen.count} since boot; the kernel's log can't be read, and {seen.deaths} processes of the run died"
        return _kills(Verdict.UNKNOWN, said, facts)
    is_known = seen.kills is not None or not seen.count
    said = "none while it ran" if is_known else "none of this run's processes died"
    return _kills(Verdict.OK, said + (f" ({seen.count} since boot)" if seen.count else ""), facts)


def _kills(verdict: Verdict, said: str, facts: dict[str, object]) -> Finding:
    return Finding(check="memory", subject="kills for memory", verdict=verdict, said=said, facts=facts)


# ── logs ──


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorsSeen:
    """Lines of one kind in one log. Times are unix seconds, None where no line had one."""

    kind: str
    log: str
    count: int
    first: float | None
    last: float | None


def judge_errors(seen: Sequence[ErrorsSeen], *, now: float, recent_s: float, is_live: bool) -> list[Finding]:
    """Old ones are a note: what was repaired is over. Those of the last moments of a live run are not."""
    if not seen:
        return [
            Finding(check="logs", subject="connections", verdict=Verdict.OK, said="no connection error in the logs")
        ]
    found = []
    for one in seen:
        is_recent = is_live and one.last is not None and now - one.last <= recent_s
        facts = {"kind": one.kind, "log": one.log, "count": one.count, "first": one.first, "last": one.last}
        found.append(
            Finding(
                check="logs",
                subject=one.log,
                verdict=Verdict.BAD if is_recent else Verdict.NOTE,
                said=f"{one.count:,} × {one.kind}{_when(one, now)}",
                facts=facts,
            )
        )
    return found


def _when(one: ErrorsSeen, now: float) -> str:
    if one.last is None or one.first is None:
        return ", at times that the lines don't say"
    if one.count == 1:
        return f", {_ago(now - one.last)}"
    return f", from {_ago(now - one.first)} to {_ago(now - one.last)}"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.1f} h ago"
