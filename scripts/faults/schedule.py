"""When each fault comes: parses the command line, draws a storm from a seed, and decides to fire, wait or refuse.

Pure: no clock, no process, no file. One fault is written `KIND[:option=value,…][@STEP | @+SECONDS]`, e.g. `C1`,
`C1:part=http,server=0@30`, `C2:seconds=20@+60`; in a storm `KIND[:option=value,…][xN]`.
"""

from __future__ import annotations

import enum
import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.base.errors import UsageError
from scripts.faults.declaration import FaultKind, Value
from scripts.faults.kinds import KINDS

_FAULT = re.compile(
    r"(?P<kind>[A-Z]\d{0,2}(?:-[a-z]+)?)(?::(?P<options>[^@]*?))?(?:x(?P<times>\d+))?(?:@(?P<when>\+?[\d.]+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledFault:
    """One fault to come: after step `at_step` was committed, `after_s` seconds from the beginning, or at once."""

    kind: FaultKind
    options: Mapping[str, Value]
    at_step: int | None = None
    after_s: float | None = None

    @property
    def is_scheduled(self) -> bool:
        return self.at_step is not None or self.after_s is not None

    def __str__(self) -> str:
        options = ",".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in self.options.items()
        )
        when = "" if self.at_step is None else f"@{self.at_step}"
        when = when if self.after_s is None else f"@+{self.after_s:g}"
        return f"{self.kind.id}{':' if options else ''}{options}{when}"


def parse_fault(text: str) -> ScheduledFault:
    """Raises UsageError naming what in `text` is wrong."""
    fault, times = _parse(text)
    if times is not None:
        raise UsageError(f"{text!r}: x{times} belongs into a storm", "name the fault several times, or use --storm")
    return fault


def _parse(text: str) -> tuple[ScheduledFault, int | None]:
    match = _FAULT.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a fault", "write KIND[:option=value,…][@STEP or @+SECONDS], e.g. C1@30")
    kind = KINDS.get(match["kind"])
    if kind is None:
        raise UsageError(f"{match['kind']!r} is no kind of fault", f"one of {', '.join(KINDS)}; see --list")
    if kind.out_of_reach:
        raise UsageError(f"{kind.id} can't be injected from outside", kind.out_of_reach)
    when = match["when"]
    try:
        step = int(when) if when and not when.startswith("+") else None
        after_s = float(when) if when and when.startswith("+") else None
    except ValueError as error:
        raise UsageError(f"{text!r}: @{when} is no time", "write @30 for a step, @+60 for seconds") from error
    fault = ScheduledFault(kind=kind, options=_options(kind, match["options"] or ""), at_step=step, after_s=after_s)
    return fault, None if match["times"] is None else int(match["times"])


def _options(kind: FaultKind, text: str) -> dict[str, Value]:
    """The kind's defaults with what is given."""
    options: dict[str, Value] = {name: option.default for name, option in kind.options.items()}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in kind.options:
            known = ", ".join(kind.options) or "it has none"
            raise UsageError(f"{kind.id} has no option {name!r}", f"its options: {known}; see --list")
        options[name] = kind.options[name].read(name, value)
    return options


def storm(text: str, *, first_step: int, last_step: int, seed: int) -> tuple[ScheduledFault, ...]:
    """Faults such as `C1x3 C2x2 C7`, each at a step of its own, drawn by `seed` from first_step to last_step.

    The range is cut into as many equal pieces as there are faults, and each gets a step of its piece: so the order
    and the distances are random, and yet none comes before the one before it can be over. Raises UsageError.
    """
    drawn: list[ScheduledFault] = []
    for word in text.replace("×", "x").split():
        fault, times = _parse(word)
        if fault.is_scheduled:
            raise UsageError(f"{word!r}: a storm draws the steps itself", "leave out what begins with @")
        drawn += [fault] * (1 if times is None else times)
    if not 0 <= first_step <= last_step or last_step - first_step + 1 < len(drawn):
        raise UsageError(
            f"--steps {first_step}:{last_step} has no room for {len(drawn)} faults", "give a longer range of steps"
        )
    draw = random.Random(seed)
    draw.shuffle(drawn)
    steps = last_step + 1 - first_step
    bounds = [first_step + number * steps // max(len(drawn), 1) for number in range(len(drawn) + 1)]
    return tuple(
        replace(fault, at_step=draw.randrange(begin, end))
        for fault, (begin, end) in zip(drawn, itertools.pairwise(bounds), strict=True)
    )


def in_order(faults: Sequence[ScheduledFault]) -> list[ScheduledFault]:
    """Those at once first, then by seconds, then by step; what was named earlier first."""
    return sorted(
        faults,
        key=lambda fault: (fault.is_scheduled, fault.at_step is not None, fault.after_s or 0.0, fault.at_step or 0),
    )


class FaultChoice(enum.StrEnum):
    """What is done with a fault at this moment."""

    WAIT = "wait"
    FIRE = "fire"
    REFUSE = "refuse"
    MISS = "miss"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMoment:
    """What is known now. `step`: the last committed, None before the first. Empty reasons: nothing is against it."""

    elapsed_s: float
    step: int | None
    run_is_live: bool = True
    recovering: str = ""  # why the role that is meant must be left alone for now
    last_copy: str = ""  # why this would end the last good copy of something


ENDS_TRAINER = frozenset({"T1", "T2", "T6", "T7", "T8", "N2", "M2"})
ENDS_SERVER = frozenset({"C1", "C2", "C3", "C9"})
COPIES_COUNT = ENDS_SERVER | ENDS_TRAINER | {"T4", "T5", "C7"}
"""Kinds for which it matters how many copies there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """How many there are. `complete_checkpoints` were verified by their hashes; counting may stop at two."""

    complete_checkpoints: int
    live_servers: int


def last_copy(kind: str, copies: Copies, *, keep_one: bool) -> str:
    """Why a fault of `kind` would end a last good copy; empty where it would not."""
    if kind == "T4" and copies.complete_checkpoints < 2:
        return f"{copies.complete_checkpoints} complete checkpoint(s): T4 would leave none"
    if kind in ENDS_TRAINER | {"T5"} and copies.complete_checkpoints < 1:
        return "there is no complete checkpoint yet: the trainer's process holds the only copy of what was learned"
    if keep_one and kind == "C7":
        return "C7 ends every server, and --keep-one asks for one to stay"
    if keep_one and kind in ENDS_SERVER and copies.live_servers < 2:
        return f"{copies.live_servers} server(s) generate, and --keep-one asks for one to stay"
    return ""


def is_due(fault: ScheduledFault, moment: FaultMoment) -> bool:
    if fault.at_step is not None:
        return moment.step is not None and moment.step >= fault.at_step
    return fault.after_s is None or moment.elapsed_s >= fault.after_s


def decide(fault: ScheduledFault, moment: FaultMoment, *, due_for_s: float, within_s: float) -> tuple[FaultChoice, str]:
    """Fire, wait, refuse or miss, and why. `due_for_s`: how long it has been due, `within_s`: how long it may be.

    What would end a last copy is refused at once where it was asked for at once; a scheduled one waits for a second
    copy as it waits for a recovery.
    """
    if not moment.run_is_live:
        return FaultChoice.MISS, "the run has ended"
    if not is_due(fault, moment):
        return FaultChoice.WAIT, f"step {moment.step}, {moment.elapsed_s:.0f} s: not due yet"
    if moment.last_copy and not fault.is_scheduled:
        return FaultChoice.REFUSE, moment.last_copy
    against = moment.last_copy or moment.recovering
    if not against:
        return FaultChoice.FIRE, "due"
    if due_for_s < within_s:
        return FaultChoice.WAIT, against
    return (FaultChoice.REFUSE if moment.last_copy else FaultChoice.MISS), f"{against}, for {due_for_s:.0f} s"
