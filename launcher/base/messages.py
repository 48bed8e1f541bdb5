"""Frozen records that are passed between actors, and from the policies to the code that acts."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.base.disk_faults import Refusal
from launcher.base.rank_location import RankLocation


class ServerState(enum.StrEnum):
    """State of one SGLang server. READY is reached only through STALE with the weights loaded."""

    STARTING = "STARTING"
    STALE = "STALE"
    READY = "READY"
    SUSPECT = "SUSPECT"
    DEAD = "DEAD"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


ServerKey = tuple[str, int]
"""One incarnation of a server: its name and its generation. What is seen of it is no news of the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """One server as its actor knows it. `weight_version` is None until the server has reported one.

    `lineage`: how many restores lay behind the trainer's weights when it got its own; None where nobody knows.
    `node`: Ray's id of the node that `pid` is of.
    """

    name: str
    index: int
    generation: int
    state: ServerState
    url: str = ""
    pid: int | None = None
    weight_version: int | None = None
    lineage: int | None = None
    reason: str = ""
    node: str = ""

    @property
    def key(self) -> ServerKey:
        return self.name, self.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerExit:
    """The end of one incarnation of a server. `exit_code` is negative for a signal, None where nobody saw it.

    `age_s`: seconds since it was noticed, when this was sent. `oom_kills`: by the kernel of its machine, shortly
    before. `was_told`: it ended because it was asked to, not by itself.
    """

    name: str
    generation: int
    pid: int
    exit_code: int | None
    reason: str
    age_s: float
    oom_kills: int = 0
    was_told: bool = False

    def aged(self, seconds: float) -> ServerExit:
        """The same, so many seconds later."""
        return replace(self, age_s=self.age_s + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One committed optimizer step: a line of metrics.jsonl and one of ledger.jsonl (docs/files.md).

    `filtered_ids`: prompts that it used up and did not train on. `lineage`: how many restores of its attempt lay behind
    it, which says what came first whatever the clock was set to; None where that is not known.
    """

    global_step: int
    epoch: int
    epoch_step: int
    attempt: int
    policy_version: int
    time: float
    prompt_ids: tuple[str, ...]
    weight_versions: tuple[int, ...]
    rollouts_failed: int
    rollouts_retried: int
    metrics: Mapping[str, float]
    filtered_ids: tuple[str, ...] = ()
    lineage: int | None = None

    def metrics_line(self) -> dict[str, object]:
        names = ("global_step", "epoch", "epoch_step", "attempt", "policy_version", "time")
        lineage = {} if self.lineage is None else {"lineage": self.lineage}
        return {name: getattr(self, name) for name in names} | lineage | dict(self.metrics)

    def ledger_line(self) -> dict[str, object]:
        lists: dict[str, object] = {"prompt_ids": list(self.prompt_ids), "weight_versions": list(self.weight_versions)}
        lists |= {"filtered_ids": list(self.filtered_ids)} if self.filtered_ids else {}
        counts = {"rollouts_failed": self.rollouts_failed, "rollouts_retried": self.rollouts_retried}
        return {"global_step": self.global_step, "attempt": self.attempt} | lists | counts


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Accuracy on held-out prompts at one policy version: `sampled` at the training temperature, `greedy` at 0.

    `by_dataset`: the same two of each held-out data set, where there are several. `unscored`: how many of the `prompts`
    got no reward, and are missing in one of the means or in both.
    """

    policy_version: int
    prompts: int
    sampled: float
    greedy: float
    by_dataset: Mapping[str, Sequence[float]] = field(default_factory=dict)
    unscored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """What the trainer is doing now. `phase` is one of start, rollout, train, publish, checkpoint, evaluate, idle."""

    phase: str
    next_step: int
    total_steps: int
    steps_per_epoch: int
    policy_version: int
    pid: int
    seconds_in_phase: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReady:
    """What the trainer found when it was put together."""

    next_step: int
    total_steps: int
    steps_per_epoch: int
    policy_version: int
    prompts: int
    held_out: int
    left_out: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerEnd:
    """How `run` returned: after the last step, or because it was asked to stop."""

    finished: bool
    next_step: int
    evals: tuple[EvalReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """A complete Hugging Face folder that a server may start from."""

    path: str
    version: int
    lineage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFailure:
    """Why the step loop ended with an error: the error's class, its message, and the step that it was at."""

    kind: str
    message: str
    global_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A batch that was turned away. `id` is its own among all of a run; `subjects`: whose failure it was, where known.

    `file`: where the batch is kept for a person, "" where it could not be.
    """

    id: str
    global_step: int
    reason: str
    cause: Cause | None = None
    subjects: tuple[str, ...] = ()
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerView:
    """The state of the trainer that its repair needs.

    `busy`: what long order it carries out ("starting", "restoring"), "" if none. `is_allowed`: ordered to step;
    `is_running`: the loop is. `servers`: as its pool has them, so with the weights that each confirmed. `in_flight`:
    the requests that each answers. `loading`: those that the trainer sends weights. `is_at_gate`: it waits for the
    HealthMonitor. `progress`: any number that changes while it gets on. `weights`: the newest in a folder.
    `rejections`: batches turned away since the last step. `node`: that `pid` is of.
    `largest_micro_batch`: so far, in tokens, padding included. `refusal`: the write that stopped the loop, as a disk
    refused it; None once it may step again. `is_parked`: an empty process that has imported what takes long. `gpus`:
    its own, as CUDA_VISIBLE_DEVICES has them. `ranks`: beside the first. `is_saving`: it writes a checkpoint.
    """

    pid: int
    busy: str = ""
    is_started: bool = False
    is_loaded: bool = False
    is_allowed: bool = False
    is_running: bool = False
    is_finished: bool = False
    is_at_gate: bool = False
    phase: str = "start"
    progress: int = 0
    lineage: int = 0
    policy_version: int = 0
    next_step: int = 0
    total_steps: int = 0
    steps_per_epoch: int = 0
    seconds_in_phase: float = 0.0
    longest_sequence: int = 0
    largest_micro_batch: int = 0
    failure: LoopFailure | None = None
    refusal: Refusal | None = None
    is_saving: bool = False
    rejections: tuple[Rejection, ...] = ()
    weights: PublishedWeights | None = None
    servers: tuple[ServerInfo, ...] = ()
    in_flight: Mapping[str, int] = field(default_factory=dict)
    loading: tuple[str, ...] = ()
    evals: tuple[EvalReport, ...] = ()
    node: str = ""
    is_parked: bool = False
    gpus: str = ""
    ranks: tuple[RankLocation, ...] = ()


class TerminalStatus(enum.StrEnum):
    """How a run ends (P9)."""

    FINISHED = "FINISHED"
    ERRORED = "ERRORED"
    ABORTED = "ABORTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended, the reason, and the next command for the user.

    `last_step` is the last one committed, None where there was none. `exit_code` only where it isn't the status's own.
    `may_pass`: another attempt may go on.
    """

    status: TerminalStatus
    reason: str
    next_command: str = ""
    last_step: int | None = None
    exit_code: int | None = None
    may_pass: bool = False
    evals: Sequence[EvalReport] = field(default=())


class Health(enum.StrEnum):
    """UNKNOWN is never healthy, and never a reason to kill (P7)."""

    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"
    DEAD = "DEAD"
    UNKNOWN = "UNKNOWN"


class Cause(enum.StrEnum):
    """Why something failed (docs/supervision.md)."""

    SERVER_CRASH = "server_crash"
    SERVER_HANG = "server_hang"
    SERVER_OOM = "server_oom"
    SERVER_STALE = "server_stale"
    SERVER_CORRUPT = "server_corrupt"
    SERVER_SLOW = "server_slow"
    GPU_FAULT = "gpu_fault"
    TRAINER_CRASH = "trainer_crash"
    TRAINER_HANG = "trainer_hang"
    TRAINER_OOM = "trainer_oom"
    NONFINITE = "nonfinite"
    REWARD_COLLAPSE = "reward_collapse"
    VERIFIER_BROKEN = "verifier_broken"
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    NODE_LOST = "node_lost"
    DISK_FULL = "disk_full"
    OUTSIDE_WEIGHTS = "outside_weights"
    CLUSTER_LOST = "cluster_lost"
    DRIVER_LOST = "driver_lost"
    RUN_HALTED = "run_halted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The health of one server or of the trainer, and why. `cause` where something is wrong that has a name."""

    health: Health
    reason: str
    cause: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something is wrong with what is learned, not with a process.

    `onset_step` is the first step whose own figures show it, as estimated, not the step of the alarm; None where no
    step was touched. `since` is when it was first seen, on the clock of whoever decides. `had_learned`: the rewards
    were above those of the run's first steps when it began. `is_sharp`: the steps before the onset are as usual, and
    the onset itself is far from that.
    """

    cause: Cause
    subject: str
    reason: str
    since: float
    onset_step: int | None = None
    evidence: Mapping[str, object] = field(default_factory=dict)
    had_learned: bool = False
    is_sharp: bool = False


Overrides = Mapping[str, float | int | bool]
"""Settings that differ from the configuration, by their dotted keys."""
