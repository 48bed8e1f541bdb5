"""Does the ledger add up? Every step once, on its own weights; every prompt once in each epoch (P1, P2, P3).

Pure: lines in, findings out. Only the current lines are audited, so those of the steps that made the current weights.
That a line or a prompt is there twice shows in the ledger alone. That one is lost shows only beside what the ledger did
not write: the checkpoint's queue, the run's total of steps, the data set. Where one of them is not known, the audit
says so (P11).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from launcher.base.prompt_order import PromptOrder
from launcher.base.wording import counted
from launcher.run_files.journal import Record, current_lines
from launcher.run_log.step_line import DISTANCE

MOST_NAMED = 50
FEWEST_ORDERED = 64
"""Of fewer prompts, half may come in the order of another epoch by chance."""
NOT_READ = "the data set was not read"
NO_CHECKPOINT = "no checkpoint was read"
BOUND = "rollout.max_head_offpolicyness"

NONE_OF_ITS_OWN: Mapping[int, int | None] = MappingProxyType({})

Uses = Sequence[tuple[int, Sequence[object]]]
"""Of one epoch: each step, and the prompts that it used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The prompts' queue in the checkpoint of `step`: `epoch` has used up its first `cursor` prompts but those that
    were `returned`. `fingerprint`: of the data set, its order and the seed."""

    step: int
    epoch: int
    cursor: int
    returned: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """`problems` describe violations. None: the ledger is complete, as far as it is not under `not_known`.

    `total_steps`: of the run, where it FINISHED. `loss_known_until`: the last step up to which a checkpoint, or the end
    of an epoch, shows that nothing is lost; None where nothing shows it. `filtered`: how often a prompt was used up and
    not trained on, as its group had no signal. `times`: how many prompts were used up how often, the rarest first.
    """

    steps: int
    total_steps: int | None
    taken_back: int
    prompts: int
    times: tuple[tuple[int, int], ...]
    stale_steps: int
    largest_distance: float
    problems: tuple[str, ...]
    not_known: tuple[str, ...]
    loss_known_until: int | None
    filtered: int = 0

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why nobody can say that nothing was lost, doubled or stale."""
        return (*self.problems, *(f"not known: {what}" for what in self.not_known))

    @property
    def counts(self) -> str:
        return counts_in_words(self.times, self.steps, self.total_steps, nothing_lost=not self.problems)


def counts_in_words(
    times: Sequence[tuple[int, int]], steps: int, total_steps: int | None, *, nothing_lost: bool = False
) -> str:
    """As `160 prompts, each exactly 12 times; 120 of 120 steps`. `nothing_lost`: prompts that were never used are those
    that the first epoch had not reached."""
    of = "" if total_steps is None else f" of {total_steps:,}"
    taken = f"{steps:,}{of} steps"
    if len(times) == 1:
        ((often, prompts),) = times
        return f"{counted(prompts, 'prompt')}, each exactly {_times(often)}; {taken}"
    if nothing_lost and [often for often, _ in times] == [0, 1]:
        (_, left), (_, once) = times
        rest = f"the epoch was not finished: {counted(left, 'prompt')} {'was' if left == 1 else 'were'} not reached"
        return f"{once:,} of {counted(once + left, 'prompt')} once; {rest}; {taken}"
    each = ", ".join(f"{prompts:,} of them {_times(often)}" for often, prompts in times)
    return f"{counted(sum(prompts for _, prompts in times), 'prompt')}: {each or 'none used'}; {taken}"


def audit(
    ledger: Sequence[Record],
    metrics: Sequence[Record],
    *,
    prompts: int,
    staleness: int | None = 0,
    staleness_of: Mapping[int, int | None] = NONE_OF_ITS_OWN,
    total_steps: int | None = None,
    restores: Sequence[int] | None = None,
    queue: QueueState | str = NO_CHECKPOINT,
    order: PromptOrder | str = NOT_READ,
) -> Audit:
    """`prompts`: of one epoch. `staleness`: versions that a token may be behind (rollout.max_head_offpolicyness), None
    where nothing says it; `staleness_of`: of attempts with settings of their own. `total_steps`: of a run that
    FINISHED. `restores`: the step of each, in their order; None where nobody knows them. `queue`, `order`: or why it is
    not known.

    Holds also for a run that has not ended: then the last epoch need not be complete.
    """
    stand, measured = current_lines(ledger), current_lines(metrics)
    steps = [_step(line) for line in stand]
    bounds = [_bound(line, staleness, staleness_of) for line in stand]
    stale = [_step(line) for line, bound in zip(stand, bounds, strict=True) if not _is_fresh(line, bound)]
    end, not_known = max(steps, default=-1), []
    if None in bounds:
        not_known.append(f"whether tokens are older than {BOUND} allows: the run's settings can't be read")
    problems = [
        *_without("steps never committed", steps, end + 1),
        *_unlike(steps, measured),
        *_taken_again("the ledger has", ledger, restores),
        *(_measured_twice(metrics) or _taken_again("the metrics have", metrics, restores)),
    ]
    if total_steps is not None and len(steps) != total_steps:
        problems.append(f"{len(steps):,} of the run's {total_steps:,} steps")
    if isinstance(queue, str):
        not_known.append(f"whether steps or prompts are missing at the ledger's end: {queue}")
    elif queue.step > end:
        problems.append(f"the ledger ends with step {end}, the checkpoint with step {queue.step}")
    known = _order_of_run(order, queue)
    if isinstance(known, str):
        not_known.append(f"whether the prompts are those of the data set, in its order: {known}")
    epochs = _by_epoch(stand, measured, prompts)
    known_until = _loss_known_until(epochs, prompts, queue, end)
    if known_until is not None and known_until < end:
        last = max(epochs)
        not_known.append(
            f"whether prompts of epoch {last} were lost after step {known_until}, of the newest complete checkpoint"
        )
    problems += _of_prompts(
        epochs,
        prompts,
        None if isinstance(queue, str) or queue.step > end else queue,
        None if isinstance(known, str) else known,
    )
    problems += [f"step {_step(line)}: it names no prompts" for line in stand if not _ids(line)]
    problems += [f"step {step}: tokens of other weights than its own" for step in stale]
    distances = [float(d) for line in measured if isinstance(d := line.get(DISTANCE), int | float)]
    used = Counter(prompt for line in stand for prompt in _ids(line))
    there_are = prompts if isinstance(known, str) else len(known.ids)
    return Audit(
        steps=len(steps),
        total_steps=total_steps,
        taken_back=len(ledger) - len(stand),
        prompts=len(used),
        times=_how_often(used, there_are),
        stale_steps=len(stale),
        largest_distance=max(distances, default=math.nan),
        problems=tuple(problems),
        not_known=tuple(not_known),
        loss_known_until=known_until,
        filtered=sum(len(_list(line, "filtered_ids")) for line in stand),
    )


def _order_of_run(order: PromptOrder | str, queue: QueueState | str) -> PromptOrder | str:
    """Only the checkpoint's fingerprint shows that the data set is still the one that the run has read."""
    if isinstance(order, str):
        return order
    if isinstance(queue, str):
        return f"the data set may have changed since: {queue}"
    if order.fingerprint != queue.fingerprint:
        return "the data set has changed since, or the trainer has left some of its records out"
    return order


# ── steps ──


def _without(what: str, numbers: Iterable[int], end: int) -> list[str]:
    """Which of 0 … end - 1 are not among `numbers`, of which none is above `end`. The first MOST_NAMED are named: one
    damaged line may claim any number."""
    named: list[int] = []
    missing, expected = 0, 0
    for number in sorted({*(number for number in numbers if number >= 0), end}):
        missing += number - expected
        named += range(expected, min(number, expected + MOST_NAMED))
        expected = number + 1
    return [f"{what}: {_some(named, missing)}"] if missing > 0 else []


def _unlike(steps: Sequence[int], measured: Sequence[Record]) -> list[str]:
    known = {_step(line) for line in measured}
    missing, alone = sorted({*steps} - known), sorted(known - {*steps})
    problems = [f"steps without metrics: {_some(missing)}"] if missing else []
    return problems + ([f"metrics of steps that the ledger has not: {_some(alone)}"] if alone else [])


def _measured_twice(metrics: Sequence[Record]) -> list[str]:
    """A step that is taken again has another time."""
    lines = Counter(
        (step, line.get("attempt"), line["time"])
        for line in metrics
        if isinstance(step := line.get("global_step"), int) and line.get("time")
    )
    twice = sorted({step for (step, _, _), count in lines.items() if count > 1})
    return [f"metrics lines that are there twice: {_some(twice)}"] if twice else []


def _taken_again(who: str, lines: Sequence[Record], restores: Sequence[int] | None) -> list[str]:
    """Only a restore to the step before lets a step be taken again. The first restore comes before all steps."""
    if restores is None:
        return []
    problems, waiting, before = [], deque(restores[1:]), -1
    for line in lines:
        step = line.get("global_step")
        if not isinstance(step, int):
            continue
        if step <= before:
            if step - 1 in waiting:
                while waiting.popleft() != step - 1:
                    continue
            else:
                problems.append(f"step {step}: {who} it again, and no restore to step {step - 1} is recorded")
        before = step
    return problems


def _bound(line: Record, staleness: int | None, of_attempts: Mapping[int, int | None]) -> int | None:
    attempt = line.get("attempt")
    return of_attempts.get(attempt, staleness) if isinstance(attempt, int) else staleness


def _is_fresh(line: Record, staleness: int | None) -> bool:
    """A step is trained at the version of its number: the optimizer steps before it. No version is none of its own."""
    step, versions = _step(line), _list(line, "weight_versions")
    oldest = 0 if staleness is None else step - staleness
    return bool(versions) and all(isinstance(one, int) and oldest <= one <= step for one in versions)


# ── prompts ──


def _by_epoch(stand: Sequence[Record], measured: Sequence[Record], prompts: int) -> dict[int, Uses]:
    """By the epoch in the step's metrics; without these, an epoch ends when all its prompts have been met."""
    said = {_step(line): epoch for line in measured if isinstance(epoch := line.get("epoch"), int)}
    found: dict[int, list[tuple[int, Sequence[object]]]] = defaultdict(list)
    epoch, met = 0, set[object]()
    for line in stand:
        step = _step(line)
        now = said.get(step, epoch + (len(met) >= prompts))
        if now != epoch:
            epoch, met = now, set()
        met.update(_ids(line))
        found[epoch].append((step, _ids(line)))
    return dict(found)


def _of_prompts(
    epochs: Mapping[int, Uses], prompts: int, queue: QueueState | None, order: PromptOrder | None
) -> list[str]:
    last = max([*epochs, *(() if queue is None else (queue.epoch,))], default=0)
    problems = _without("epochs without a step", epochs, last)
    if order is not None:
        known = {*order.ids}
        strangers = sorted({str(one) for uses in epochs.values() for one in _used(uses) if one not in known})
        problems += [f"prompts that are in no data set: {_some(strangers)}"] if strangers else []
    for epoch in sorted({*epochs, last}):
        uses = epochs.get(epoch, ())
        problems += _twice(uses)
        ids = None if order is None else order.ids_of(epoch)
        if epoch < last:
            problems += _unlike_due(f"epoch {epoch}", _used(uses), prompts, ids)
        if queue is not None and epoch == queue.epoch:
            before = {one for step, ids_of_step in uses if step <= queue.step for one in ids_of_step}
            returned = {*queue.returned}
            due = None if ids is None else [one for one in ids[: queue.cursor] if one not in returned]
            what = f"epoch {epoch} up to the checkpoint of step {queue.step}"
            problems += _unlike_due(what, before, queue.cursor - len(queue.returned), due)
    return problems + ([] if order is None else _in_anothers_order(epochs, order))


def _loss_known_until(epochs: Mapping[int, Uses], prompts: int, queue: QueueState | str, end: int) -> int | None:
    """Of an epoch that has not ended, only the checkpoint's queue says which prompts had their turn."""
    if isinstance(queue, str):
        return None
    is_whole = queue.step < end and len(_used(epochs[max(epochs)])) == prompts
    return end if is_whole else min(queue.step, end)


def _twice(uses: Uses) -> list[str]:
    problems: list[str] = []
    met: set[object] = set()
    for step, ids in uses:
        for prompt in ids:
            if prompt in met:
                problems.append(f"step {step}: prompt {prompt} a second time in its epoch")
            met.add(prompt)
    return problems


def _unlike_due(what: str, used: Set[object], count: int, due: Sequence[str] | None) -> list[str]:
    """`due`: the `count` prompts that must have been used up, where they are known."""
    if due is None:
        return [f"{what}: {len(used):,} prompts used up, not {count:,}"] if len(used) != count else []
    lost = [one for one in due if one not in used]
    early = sorted(str(one) for one in used - {*due})
    problems = [f"{what}: lost {_some(lost)}"] if lost else []
    return problems + ([f"{what}: not its turn {_some(early)}"] if early else [])


def _in_anothers_order(epochs: Mapping[int, Uses], order: PromptOrder) -> list[str]:
    """Prompts that went back come out of order. That most come in another epoch's order is no chance."""
    problems = []
    for epoch, uses in sorted(epochs.items()):
        count = sum(len(ids) for _, ids in uses)
        if count >= FEWEST_ORDERED and 2 * _in_order(uses, order.ids_of(epoch)) <= count:
            others = [one for one in sorted(epochs) if 2 * _in_order(uses, order.ids_of(one)) > count]
            problems += [f"epoch {epoch}: its prompts are in the order of epoch {other}" for other in others]
    return problems


def _in_order(uses: Uses, order: Sequence[str]) -> int:
    """How many of the prompts, at most, came in this order (the longest rising sequence of their places). Those of one
    step are taken together."""
    places: dict[object, int] = {one: place for place, one in enumerate(order)}
    ends: list[int] = []  # of the best sequence of each length
    for _, ids in uses:
        for place in sorted(places[one] for one in ids if one in places):
            at = bisect_left(ends, place)
            ends[at : at + 1] = [place]
    return len(ends)


def _used(uses: Uses) -> set[object]:
    return {one for _, ids in uses for one in ids}


def _how_often(used: Counter[object], there_are: int) -> tuple[tuple[int, int], ...]:
    times = Counter(used.values())
    if len(used) < there_are:
        times[0] = there_are - len(used)
    return tuple(sorted(times.items()))


# ── words and values ──


def _times(times: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(times, f"{times:,} times")


def _some(named: Sequence[object], count: int | None = None) -> str:
    """`count`: of all, where `named` has not all of them."""
    shown = [*named[:MOST_NAMED]]
    count = len(named) if count is None else count
    return f"{shown} and {count - len(shown):,} more" if count > len(shown) else f"{shown}"


def _ids(line: Record) -> Sequence[object]:
    return (*_list(line, "prompt_ids"), *_list(line, "filtered_ids"))


def _list(line: Record, key: str) -> Sequence[object]:
    values = line.get(key)
    return values if isinstance(values, Sequence) and not isinstance(values, str) else ()


def _step(line: Record) -> int:
    """Of a current line: one without a step is none."""
    return cast(int, line["global_step"])
