"""The interface between the launcher and another project's trainer, and how an adapter is found by its name.

`CommandAdapter` implements it for any command, `TrlAdapter` for scripts with TRL's GRPOTrainer, `ArealAdapter` for
AReaL. A package adds its own under a name of the entry-point group `grpo_launcher.trainers`: a callable that takes the
settings of `trainer` and returns a TrainerAdapter. `actors/foreign` is its only caller.

An adapter reads and answers; it starts, signals and writes nothing, and keeps nothing but what it has read. So it can
be tested with texts and folders, and made again at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from launcher.base.errors import ConfigError, UsageError
from launcher.config.foreign import ForeignTrainerConfig

GROUP = "grpo_launcher.trainers"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCommand:
    """`words`: the executable and its arguments. `variables` are added to the environment. `removes`: files and folders
    of the trainer before that this one must not find. `writes`: files that it must, with their text."""

    words: tuple[str, ...]
    cwd: Path
    variables: Mapping[str, str]
    removes: tuple[Path, ...] = ()
    writes: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """One step that the trainer reported. `reward`: its mean, None where it has none. `spread`: the rewards' standard
    deviation, `at`: unix seconds, `total`: of all its steps, None where unknown. `nonfinite`: names of figures that are
    NaN or infinite. `is_paused`: no step; after this one it waits for the end of a pause, or (False) does not."""

    step: int
    reward: float | None = None
    spread: float | None = None
    at: float | None = None
    nonfinite: tuple[str, ...] = ()
    total: int | None = None
    is_paused: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint on the disk, with the weights after `step`. `changed_at`: unix seconds of the newest change in it.

    `is_whole` None: it does not show that itself. `problem`: why it is not whole. `with_it`: what is moved where it is.
    `has_optimizer` False: one that has it comes first, where both are from before an onset. `no_resume`: why a trainer
    can't resume from it, whole as it is."""

    step: int
    path: Path
    changed_at: float
    is_whole: bool | None
    problem: str = ""
    with_it: tuple[Path, ...] = ()
    has_optimizer: bool = True
    no_resume: str = ""


class TrainerAdapter(Protocol):
    """One project's trainer. `stop_s`: from SIGTERM to SIGKILL. `source`: the file that steps are read from, None: the
    command's output. `reads`: the setting that says how, for messages."""

    stop_s: float
    source: Path | None
    reads: str

    def missing(self) -> Iterator[UsageError]:
        """Everything that keeps it from starting here, each with the setting to change. Looks, and creates nothing."""

    def plan(self) -> Iterator[str]:
        """Lines of the plan: what its checkpoints are, and how it resumes."""

    def command(self, resume: Path | None) -> TrainerCommand:
        """What to run: from the beginning, or from a checkpoint."""

    def preparation(self, resume: Path | None) -> TrainerCommand | None:
        """What has to end with exit code 0 before a resume from a checkpoint; None: what takes the last one back."""

    def is_trainer(self, words: Sequence[str]) -> bool:
        """Whether a command line is that of a process without which the trainer can't go on, and which the command
        can outlive."""

    def is_done(self, exit_code: int | None, last_step: int | None, total_steps: int | None) -> bool:
        """Whether a command that ended is done. `exit_code` None: its trainer has ended, and the command has not."""

    def read(self, text: str) -> tuple[Sequence[StepSeen], str]:
        """The steps in new text of the source, in order; and the end of the text, to be given again with more."""

    def checkpoints(self) -> Sequence[FoundCheckpoint]:
        """Those on the disk now, by step."""


def adapter_of(settings: ForeignTrainerConfig) -> TrainerAdapter:
    """Raises ConfigError where no adapter has the name, or it refuses its settings."""
    from launcher.adapters.areal_adapter import ArealAdapter
    from launcher.adapters.command_adapter import CommandAdapter
    from launcher.adapters.trl_adapter import TrlAdapter

    built_in: Mapping[str, Callable[[ForeignTrainerConfig], TrainerAdapter]] = {
        "command": CommandAdapter,
        "trl": TrlAdapter,
        "areal": ArealAdapter,
    }
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    name = settings.adapter
    if name in built_in:
        return built_in[name](settings)
    if name not in found:
        known = ", ".join(["own", *built_in, *sorted(found)])
        raise ConfigError(
            f"trainer.adapter={name}: allowed: {known}", f"install the package that registers it as {GROUP}"
        )
    made: TrainerAdapter = found[name].load()(settings)
    return made
