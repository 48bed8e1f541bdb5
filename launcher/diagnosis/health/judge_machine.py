"""Is there room, in memory and on the disk, and has the kernel killed for want of it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.diagnosis.health.finding import CheckResult, Finding

GIB = 2.0**30
MEMORY_BAD, MEMORY_NOTE = 0.95, 0.85
FEW_CHECKPOINTS = 3


def judge_memory(name: str, used: float, limit: float) -> Finding:
    share = used / limit if limit > 0 else 1.0
    verdict = CheckResult.BAD if share >= MEMORY_BAD else CheckResult.NOTE if share >= MEMORY_NOTE else CheckResult.OK
    said = f"{used / GIB:.1f} of {limit / GIB:.1f} GiB used ({share:.0%})"
    return Finding(
        check="memory", subject=name, verdict=verdict, said=said, facts={"used_bytes": used, "limit_bytes": limit}
    )


def judge_room(folder: str, free: int, sizes: Sequence[int]) -> Finding:
    """`sizes`: bytes of the last checkpoints. The next one is written before an old one goes."""
    facts: dict[str, object] = {"free_bytes": free, "checkpoint_bytes": max(sizes, default=None), "fits": None}
    if not sizes:
        said = f"{free / GIB:.1f} GiB free in {folder}; no checkpoint yet to take the size of"
        return Finding(check="disk", subject="checkpoints", verdict=CheckResult.NOTE, said=said, facts=facts)
    fits = free // max(*sizes, 1)
    verdict = CheckResult.BAD if fits < 1 else CheckResult.NOTE if fits < FEW_CHECKPOINTS else CheckResult.OK
    said = f"{free / GIB:.1f} GiB free in {folder}: {fits:,} more checkpoints of {_size(max(sizes))} fit"
    return Finding(check="disk", subject="checkpoints", verdict=verdict, said=said, facts=facts | {"fits": int(fits)})


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


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
        return _kills(CheckResult.NOTE if seen.is_live else CheckResult.BAD, said, facts)
    if seen.ran_out:
        said = f"memory ran out {len(seen.ran_out)} times in this attempt, the last time {seen.ran_out[-1]}"
        return _kills(CheckResult.NOTE if seen.is_live else CheckResult.BAD, said, facts)
    if others:
        _, pid, name = others[-1]
        return _kills(CheckResult.NOTE, f"{len(others)} while it ran, none of this run: {name} (pid {pid})", facts)
    if seen.kills is None and seen.count and seen.deaths:
        said = f"{seen.count} since boot; the kernel's log can't be read, and {seen.deaths} processes of the run died"
        return _kills(CheckResult.UNKNOWN, said, facts)
    is_known = seen.kills is not None or not seen.count
    said = "none while it ran" if is_known else "none of this run's processes died"
    return _kills(CheckResult.OK, said + (f" ({seen.count} since boot)" if seen.count else ""), facts)


def _kills(verdict: CheckResult, said: str, facts: dict[str, object]) -> Finding:
    return Finding(check="memory", subject="kills for memory", verdict=verdict, said=said, facts=facts)
