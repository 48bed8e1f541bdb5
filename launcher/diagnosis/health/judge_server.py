"""Is a server healthy? By its processes, a real token, and the weights that it holds; one that is busy is UNKNOWN."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.diagnosis.health.finding import CheckResult, Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSeen:
    """`said_state` is the journal's word: READY, STARTING, DEAD, ABANDONED, LEAVING. `process` is the worst letter of
    proc(5) of its processes, "" where they are gone, None where they can't be seen from here. What was not answered is
    None.

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


def _server_verdict(seen: ServerSeen) -> tuple[CheckResult, str]:
    match seen.said_state:
        case "ABANDONED":
            return CheckResult.BAD, "given up; the run goes on without it"
        case "LEAVING":
            return CheckResult.NOTE, "it leaves, as it was asked to"
        case "STARTING":
            return CheckResult.UNKNOWN, "it is starting"
        case "DEAD":
            return CheckResult.BAD, "it died, and has not been started anew yet"
    if seen.process == "":
        return CheckResult.BAD, "its process is gone"
    if seen.process in ("T", "t", "Z"):
        return CheckResult.BAD, "a process of it is stopped" if seen.process != "Z" else "a process of it has ended"
    if seen.generated_s is None:
        return _silent(seen)
    if seen.expected and seen.weight_version is not None and not _is_current(seen):
        low, high = seen.expected
        wanted = str(low) if low == high else f"{low} or {high}"
        return CheckResult.BAD, f"it holds weight_version {seen.weight_version}, the trainer is at {wanted}"
    return CheckResult.OK, f"a token in {seen.generated_s:.2f} s{_load(seen)}, weight_version {seen.weight_version}"


def _silent(seen: ServerSeen) -> tuple[CheckResult, str]:
    """A server that is busy with other requests may keep one that asks for a token waiting: nobody knows then."""
    if seen.running:
        return CheckResult.UNKNOWN, f"no token of its own, while it says that it is busy{_load(seen)}: {seen.failure}"
    if seen.weight_version is not None:
        return CheckResult.BAD, f"it answers and generates nothing: {seen.failure}"
    return CheckResult.BAD, seen.failure or "no answer"


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
