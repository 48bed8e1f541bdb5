"""Does the ledger add up? Every step once, on its own weights; every prompt once in each epoch (P1, P2, P3).

Pure: lines in, findings out. Only the current lines are audited, so those of the steps that made the current weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.run_files.journal import Record, current_lines

DISTANCE = "grpo_actor/logprob_distance/avg"
MOST_NAMED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """`problems` describe violations; none: the ledger is complete. `filtered`: how often a prompt was used up and not
    trained on, as its group had no signal."""

    steps: int
    taken_back: int
    prompts: int
    stale_steps: int
    largest_distance: float
    problems: tuple[str, ...]
    filtered: int = 0


def audit(ledger: Sequence[Record], metrics: Sequence[Record], *, prompts: int, staleness: int = 0) -> Audit:
    """`prompts`: of one epoch. `staleness`: versions that a token may be behind (rollout.max_head_offpolicyness).

    Holds also for a run that has not ended: then the last epoch need not be complete.
    """
    stand = current_lines(ledger)
    steps = [_int(line, "global_step") for line in stand]
    stale = [step for step, line in zip(steps, stand, strict=True) if not _is_fresh(line, step, staleness)]
    problems = [*_gaps(steps), *_prompts(stand, prompts)]
    problems += [f"step {step}: tokens of other weights than its own" for step in stale]
    measured = current_lines(metrics)
    known = {_int(line, "global_step") for line in measured}
    if missing := sorted(set(steps) - known):
        problems.append(f"steps without metrics: {missing}")
    distances = [float(d) for line in measured if isinstance(d := line.get(DISTANCE), int | float)]
    return Audit(
        steps=len(steps),
        taken_back=len(ledger) - len(stand),
        prompts=len({prompt for line in stand for prompt in _ids(line)}),
        stale_steps=len(stale),
        largest_distance=max(distances, default=math.nan),
        problems=tuple(problems),
        filtered=sum(len(_list(line, "filtered_ids")) for line in stand),
    )


def _gaps(steps: Sequence[int]) -> list[str]:
    """The first MOST_NAMED of them by number: one damaged line may claim any step, and would leave a billion out."""
    named: list[int] = []
    missing, expected = 0, 0
    for step in sorted({step for step in steps if step >= 0}):
        missing += step - expected
        named += range(expected, min(step, expected + MOST_NAMED - len(named)))
        expected = step + 1
    more = f" and {missing - len(named):,} more" if missing > len(named) else ""
    return [f"steps never committed: {named}{more}"] if missing else []


def _prompts(stand: Sequence[Record], per_epoch: int) -> list[str]:
    """In the order of steps an epoch ends when all its prompts have been met, and none is met twice before."""
    problems: list[str] = []
    met: Counter[object] = Counter()
    for line in stand:
        for prompt in _ids(line):
            if met[prompt]:
                problems.append(f"step {_int(line, 'global_step')}: prompt {prompt} a second time in its epoch")
            met[prompt] += 1
            if len(met) == per_epoch:
                met.clear()
    return problems


def _is_fresh(line: Record, step: int, staleness: int) -> bool:
    """A step is trained at the version of its number: the optimizer steps before it."""
    versions = line.get("weight_versions")
    return isinstance(versions, Sequence) and all(step - staleness <= version <= step for version in versions)


def _ids(line: Record) -> Sequence[object]:
    return (*_list(line, "prompt_ids"), *_list(line, "filtered_ids"))


def _list(line: Record, key: str) -> Sequence[object]:
    ids = line.get(key)
    return ids if isinstance(ids, Sequence) else ()


def _int(line: Record, key: str) -> int:
    value = line.get(key)
    return value if isinstance(value, int) else -1
