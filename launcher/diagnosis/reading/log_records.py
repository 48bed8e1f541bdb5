"""What is kept of a log, whichever program wrote it: the figures of each step, and its events, counted and dated.

Both stay small however long the log is: a step costs 8 bytes for each figure, and there is one event for each kind in
each step.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from launcher.base.utc_offsets import Offsets
from launcher.base.wording import some_of
from launcher.diagnosis.reading.log_clock import WallScale
from launcher.run_log.step_line import SteppedBack

Floats = NDArray[np.float64]

REWARD, ROLLOUT_REWARD, ROLLOUT_S = "reward", "rollout_reward", "rollout_s"
N_SEQS, NO_EOS, SEQ_LEN, ENTROPY = "n_seqs", "no_eos", "seq_len", "entropy"
GRAD_NORM, UPDATED, LOSS, KL = "grad_norm", "updated", "loss", "kl"

FIGURES: Mapping[str, tuple[str, ...]] = {
    REWARD: ("task_reward/avg", "final_reward/avg", "rollout/reward"),
    ROLLOUT_REWARD: ("rollout/reward",),
    N_SEQS: ("n_seqs",),
    NO_EOS: ("no_eos_ratios/avg",),
    SEQ_LEN: ("seq_len/avg",),
    ENTROPY: ("update/entropy/avg", "entropy/avg"),
    GRAD_NORM: ("update/grad_norm", "grad_norm"),
    UPDATED: ("update/update_successful", "update_successful"),
    LOSS: ("update/actor_loss/avg", "actor_loss/avg", "loss"),
    KL: ("update/approx_kl/avg", "approx_kl/avg"),
    ROLLOUT_S: ("timeperf/rollout", "timeperf/rollout_s"),
}
"""Our names of the figures that are kept, each with the ends of the keys that hold it, best first.

AReaL's prefix differs with its version (`grpo_actor/`, `ppo_actor/`). `final_reward` is after scaling and clipping, and
`rollout/reward` is absent where no rollout finished; so the task's own reward comes first."""


class FigureNames:
    """Of the keys of a table, which figure each holds; worked out once for each set of keys."""

    def __init__(self, metric: str = "") -> None:
        """`metric`: the key that holds the reward, where it is not to be guessed."""
        self._metric = metric
        self._known: dict[frozenset[str], dict[str, str]] = {}

    def pick(self, values: Mapping[str, float]) -> dict[str, float]:
        """The figures in `values`, by our names."""
        keys = frozenset(values)
        if keys not in self._known:
            self._known[keys] = {name: key for name in FIGURES if (key := self._key_of(name, keys))}
        return {name: values[key] for name, key in self._known[keys].items()}

    def _key_of(self, name: str, keys: frozenset[str]) -> str:
        if self._metric and name == REWARD:
            return min((key for key in keys if is_metric(key, self._metric)), default="")
        for end in FIGURES[name]:
            if matching := [key for key in keys if key == end or key.endswith("/" + end)]:
                return min(matching, key=lambda key: (len(key), key))
        return ""


def is_metric(key: str, metric: str) -> bool:
    """Is it the key that was asked for? By its end, and by the end of a chart's column, `<run> - <key>`."""
    return key == metric or key.endswith("/" + metric) or metric.endswith(f" - {key}")


class Steps:
    """The steps in the order in which they were written, with their figures; NaN where a step has none.

    After a recovery the numbers go back. `backs`: recoveries that the run wrote down, which are known before a step
    follows. `global_step` counts from 0, `times` are seconds (see Contents).
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._times = array("d")
        self._columns = {name: array("d") for name in FIGURES}
        self.backs: tuple[SteppedBack, ...] = ()

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, global_step: int, time: float | None, figures: Mapping[str, float]) -> None:
        self._steps.append(global_step)
        self._times.append(math.nan if time is None else time)
        for name, column in self._columns.items():
            column.append(figures.get(name, math.nan))

    def extend(self, other: Self) -> None:
        self.backs += tuple(replace(one, after=one.after + len(self)) for one in other.backs)
        self._steps.extend(other._steps)
        self._times.extend(other._times)
        for name, column in self._columns.items():
            column.extend(other._columns[name])

    def at_times(self, moved: Callable[[float], float]) -> Steps:
        """The same with other times; those that are not known stay so."""
        other = copy(self)
        other._times = array("d", (time if math.isnan(time) else moved(time) for time in self._times))  # noqa: SLF001
        return other

    @property
    def steps(self) -> NDArray[np.int64]:
        return np.array(self._steps, dtype=np.int64)

    @property
    def times(self) -> Floats:
        return np.array(self._times, dtype=np.float64)

    def column(self, name: str) -> Floats:
        return np.array(self._columns[name], dtype=np.float64)

    @property
    def last_step(self) -> int | None:
        return self._steps[-1] if self._steps else None


class Kind(enum.StrEnum):
    """What a line of a log, or a pause in it, can mean."""

    REFUSED = "connection refused"
    LOST = "connection lost"
    TIMEOUT = "request timed out"
    REQUEST_FAILED = "request failed after its retries"
    ROLLOUT_FAILED = "rollout failed"
    REWARD_TIMEOUT = "reward timed out and counted as 0"
    REWARD_ERROR = "reward function raised"
    SERVER_LAUNCHED = "server launched"
    SERVER_READY = "server ready"
    SERVER_EXITED = "server process ended"
    SERVER_EXCEPTION = "server ended by an exception"
    SERVER_WATCHDOG = "server's watchdog fired"
    SERVER_UNHEALTHY = "server failed its health check"
    SILENCE = "server silent"
    NO_TOKENS = "server made no tokens"
    OUT_OF_MEMORY = "out of memory"
    KILLED = "process ended by SIGKILL"
    KILLED_FOR_MEMORY = "killed by the kernel for memory"
    OTHER_KILLED = "another program killed by the kernel for memory"
    TRAINER_FAILED = "trainer failed"
    CHECKPOINT = "checkpoint saved"
    RECOVER_RUN = "launched again to recover"
    RESUMED = "resumed"
    HELD = "pause asked for"
    RELEASED = "pause ended"
    INCIDENT = "incident"
    RUN_ENDED = "run ended"
    BATCH_REJECTED = "batch rejected"
    CONDEMNED = "checkpoints condemned"


FAILED = (Kind.REFUSED, Kind.LOST, Kind.TIMEOUT, Kind.REQUEST_FAILED, Kind.ROLLOUT_FAILED)
"""A request or what came of it; `facts` count the requests given up and the groups dropped among these lines."""
KILLS = (Kind.KILLED, Kind.KILLED_FOR_MEMORY, Kind.OTHER_KILLED)
"""Each line of them is an event of its own until it is known which tell of the same process. Their role is that of the
process that was killed."""


class Role(enum.StrEnum):
    """Who wrote a line."""

    TRAINER = "trainer"
    SERVER = "server"
    KERNEL = "kernel"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """Lines of one kind, `count` of them within one step (or one block of a log that has no steps). Where lines with a
    date are among them only these count: a traceback repeats what the line above it says.

    `time` and `last_time`: seconds (see Contents), None where no line nearby has a date, or one that can't be compared
    with the steps'. `after_step`: the last step that was done before it, None where there was none or it is not known.
    `where`: file and line. `facts`: the parts of the line.
    """

    kind: Kind
    role: Role
    count: int = 1
    time: float | None = None
    last_time: float | None = None
    after_step: int | None = None
    text: str = ""
    where: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """How long a pause was."""
        seconds = self.facts.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else 0.0


NOT_READ = "not read"
MOST_NAMES = 100
TENSORBOARD = "TensorBoard's events"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that was read. `role`: who wrote it. `steps`: how many it has. `first_time`, `last_time`: its dates.
    `is_unread`: it may hold steps, and could not be read, as `note` says. `skipped`: lines that were not read."""

    path: str
    what: str
    role: Role
    bytes: int
    steps: int = 0
    first_time: float | None = None
    last_time: float | None = None
    note: str = ""
    is_unread: bool = False
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What was read: the steps as written, and all events, by time where it is known. `origins`: of each step the
    index of its source. `passed_over`: files beside them that were not tried,
    in brackets why; without brackets those whose names are no log's.

    Times are unix seconds, except where `scale` is given: there they are of a log's own wall clock. Once all files are
    joined they are of one clock, and `shown` has what the run's wall clock showed (launcher/diagnosis/reading/
    time_zones.py). `utc_offsets`: the zone that the run itself wrote down."""

    sources: tuple[Source, ...]
    steps: Steps = field(default_factory=Steps)
    origins: tuple[int, ...] = ()
    log_events: tuple[LogEvent, ...] = ()
    keys: tuple[str, ...] = ()
    total_steps: int = 0
    passed_over: tuple[str, ...] = ()
    scale: WallScale | None = None
    utc_offsets: Offsets = ()
    shown: Offsets = ()

    @property
    def not_read(self) -> list[str]:
        """How many files, which, and why; and lines of those that were read."""
        said = []
        tried = [source for source in self.sources if source.what == NOT_READ]
        if count := len(tried) + len(self.passed_over):
            said.append(f"{count} file{'' if count == 1 else 's'}")
        said += [one.note if one.path in one.note else f"{one.path}: {one.note}" for one in tried]
        said += [name for name in self.passed_over if name.endswith(")")]
        if others := [name for name in self.passed_over if not name.endswith(")")]:
            said.append(f"{some_of(others, most=MOST_NAMES)}: not named as a log")
        return said + [source.skipped for source in self.sources if source.skipped]

    @property
    def has_server_log(self) -> bool:
        """Was anything read that a server wrote?"""
        told = {event.role for event in self.log_events if event.kind not in KILLS}
        return Role.SERVER in told | {source.role for source in self.sources}
