"""Any command as a trainer: its steps by a regular expression or from a JSONL file, its checkpoints by a pattern."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.adapters.trainer_adapter import FoundCheckpoint, StepSeen, TrainerCommand
from launcher.base.errors import ConfigError, ResourceError, StorageError, UsageError
from launcher.config.foreign import ForeignTrainerConfig
from launcher.config.settings import as_typed
from launcher.run_files.journal import number_of

STEP, MOST_REST = "*", 1 << 20
PYTHON = re.compile(r"python(\d(\.\d+)?)?")
PAUSED = "grpo_paused"
"""In an object of `trainer.metrics`: it is no step; the trainer waits for the end of a pause, or no longer does."""
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Of a terminal, which some loggers print into a pipe too."""
LONGEST = 1 << 15
"""Characters of a line that a pattern is looked for in: its time may grow with their square. The preset's took minutes
for a trajectory of a megabyte, in which the supervisor answered nobody."""


class CommandAdapter:
    """Raises ConfigError with the first setting that can't be used."""

    def __init__(self, settings: ForeignTrainerConfig) -> None:
        self._settings = settings
        self.stop_s = settings.stop_s
        self._cwd = Path(settings.cwd)
        self._words = split_words("trainer.command", settings.command)
        self._resume = [] if settings.resume is None else split_words("trainer.resume", settings.resume)
        for key in ("metrics", "checkpoints", "tracker"):
            if (given := getattr(settings, key)) is not None and given.startswith("~"):
                raise ConfigError(f"trainer.{key}={given}: nothing expands ~ there", "give the whole path")
        self.source = None if settings.metrics is None else self._cwd / settings.metrics
        self.reads = "trainer.pattern" if settings.metrics is None else "trainer.metrics (step_key, reward_key)"
        self._pattern = None if settings.metrics is not None else _pattern(settings.pattern)
        self._reward = None if settings.reward_pattern is None else _compiled("reward", settings.reward_pattern)
        self._at = _checkpoint_pattern(settings)

    def missing(self) -> Iterator[UsageError]:
        if not self._cwd.is_dir():
            yield StorageError(
                f"trainer.cwd={self._cwd} is no folder", "create it, or set trainer.cwd to the project's folder"
            )
            return
        yield from missing_program("trainer.command", self.command(None).words, self._settings)
        if self.source is not None and not self.source.parent.is_dir() and self.source.parent.parent != self._cwd:
            yield StorageError(
                f"trainer.metrics: {self.source.parent} is no folder", "give the path that the command writes to"
            )
        elif self.source is not None and self.source.is_dir():
            yield StorageError(f"trainer.metrics: {self.source} is a folder", "give the file that it appends steps to")

    def command(self, resume: Path | None) -> TrainerCommand:
        words = list(self._words)
        if self._settings.python is not None and PYTHON.fullmatch(words[0]):
            words[0] = self._settings.python
        if resume is not None:
            words += [word.replace(STEP, str(resume)) for word in self._resume]
        made = TrainerCommand(
            words=tuple(words),
            cwd=self._cwd,
            variables={name: str(value) for name, value in self._settings.env.items()},
        )
        if self._settings.tracker is None:
            return made
        tracker = self._cwd / self._settings.tracker
        if resume is None or (step := self._step_of(resume)) is None:
            return dataclasses.replace(made, removes=(tracker,))
        return dataclasses.replace(made, writes={tracker: self._settings.tracker_text.replace(STEP, str(step))})

    def plan(self) -> Iterator[str]:
        if self._settings.checkpoints is None:
            yield "note: trainer.checkpoints=null: after a failure it starts from the beginning"
            return
        resumed = self.command(Path(self._settings.checkpoints)).words[len(self.command(None).words) :]
        named = self._settings.tracker or "its newest"
        how = f"resumes with {shlex.join(resumed)}" if resumed else f"resumes from {named} by itself"
        yield f"checkpoints: {self._settings.checkpoints}; it {how}"

    def preparation(self, resume: Path | None) -> TrainerCommand | None:
        return None

    def is_trainer(self, words: Sequence[str]) -> bool:
        return False

    def is_done(self, exit_code: int | None, last_step: int | None, total_steps: int | None) -> bool:
        return exit_code == 0

    def read(self, text: str) -> tuple[Sequence[StepSeen], str]:
        *lines, rest = re.split(r"[\r\n]", text)
        if self._pattern is not None:
            lines = [COLOURS.sub("", line[:LONGEST]) for line in lines]
        if self._reward is not None and self._pattern is not None:
            return self._read_pairs(lines, rest)
        read = self._read_object if self._pattern is None else self._read_line
        return [step for line in lines if (step := read(line)) is not None], rest[-MOST_REST:]

    def _read_pairs(self, lines: Sequence[str], rest: str) -> tuple[Sequence[StepSeen], str]:
        """Where a step's reward has a line of its own. One that has none by the next step goes without; one that may
        still get it is in the end of the text."""
        found, begun = list[StepSeen](), None
        for line in lines:
            assert self._pattern is not None
            assert self._reward is not None
            if (seen := self._read_line(line)) is not None:
                if begun is not None:
                    found.append(begun[0])
                begun = (seen, line)
            elif begun is not None and (match := self._reward.search(line)):
                if (step := step_seen(begun[0].step, match["reward"])) is not None:
                    found.append(step)
                begun = None
        left = rest if begun is None else f"{begun[1]}\n{rest}"
        return found, left[-MOST_REST:]

    def checkpoints(self) -> Sequence[FoundCheckpoint]:
        if self._at is None:
            return []
        parts = str(self._at.relative_to(self._cwd)).split(STEP)
        paths = self._cwd.glob(STEP.join(map(glob.escape, parts)))
        steps = [(step, path) for path in paths if (step := self._step_of(path)) is not None]
        return sorted((self._found(step, path) for step, path in steps), key=lambda one: one.step)

    def _step_of(self, path: Path) -> int | None:
        """That of a checkpoint's path; None where it is none."""
        before, after = (re.escape(part) for part in str(self._at).split(STEP))
        match = re.fullmatch(rf"{before}(\d+){after}", str(path))
        return None if match is None else int(match[1])

    def _found(self, step: int, path: Path) -> FoundCheckpoint:
        name = self._settings.checkpoint_file
        problem = "" if name is None else self.problem_of(path, step, path / name)
        is_whole = None if name is None else not problem
        return FoundCheckpoint(step=step, path=path, changed_at=changed_at(path), is_whole=is_whole, problem=problem)

    def problem_of(self, path: Path, step: int, last: Path) -> str:
        """Why a checkpoint is not whole, "" where it is. `last`: the file that is written last."""
        return "" if last.is_file() else f"{last.name} is not there yet"

    def _read_line(self, line: str) -> StepSeen | None:
        match = self._pattern.search(line) if self._pattern is not None else None
        return None if match is None else step_seen(match.groupdict().get("step"), match.groupdict().get("reward"))

    def _read_object(self, line: str) -> StepSeen | None:
        """One line of the JSONL file; None where it is torn, or holds no step."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict):
            return None
        settings = self._settings
        others = {key: record[key] for key in settings.finite_keys if record.get(key) is not None}
        at = number_of(record.get(settings.time_key))
        seen = step_seen(
            record.get(settings.step_key),
            record.get(settings.reward_key),
            others,
            spread=self.spread_in(record),
            at=at if at > 0 else None,
        )
        is_paused = record.get(PAUSED)
        return (
            seen if seen is None or not isinstance(is_paused, bool) else dataclasses.replace(seen, is_paused=is_paused)
        )

    def spread_in(self, record: Mapping[str, object]) -> object:
        """The standard deviation of the rewards in an object of `trainer.metrics`; None where it has none."""
        return None


def step_seen(
    step: object,
    reward: object,
    others: dict[str, object] | None = None,
    *,
    spread: object = None,
    at: float | None = None,
    total: int | None = None,
) -> StepSeen | None:
    """From figures as a log has them; None where `step` is no whole number."""
    number = number_of(step)
    if not (math.isfinite(number) and number >= 0 and number == int(number)):
        return None
    figures = {"reward": reward, **(others or {})}
    nonfinite = tuple(name for name, value in figures.items() if value is not None and not _may_be_finite(value))
    mean, deviation = number_of(reward), number_of(spread)
    return StepSeen(
        step=int(number),
        reward=mean if math.isfinite(mean) else None,
        spread=deviation if math.isfinite(deviation) else None,
        at=at,
        nonfinite=nonfinite,
        total=total,
    )


def _may_be_finite(value: object) -> bool:
    """What is no number at all is no NaN either."""
    try:
        return math.isfinite(float(str(value)))
    except ValueError:
        return True


def missing_program(key: str, words: Sequence[str], settings: ForeignTrainerConfig) -> Iterator[UsageError]:
    """Why the words of a setting can't be run in `trainer.cwd`."""
    cwd, path = Path(settings.cwd), str(settings.env.get("PATH", os.environ.get("PATH", os.defpath)))
    executable = cwd / words[0] if "/" in words[0] else words[0]
    if shutil.which(executable, path=path) is None:
        named = "trainer.python" if words[0] == settings.python else key
        yield ResourceError(f"{named}: {words[0]} can't be run here", f"install it, or set {named} to the path of one")
    script = next((cwd / word for word in words[1:2] if word.endswith(".py")), None)
    if script is not None and not script.is_file():
        yield StorageError(f"{key}: {script} is no file", "give the script's path below trainer.cwd")


def reward_check(settings: ForeignTrainerConfig) -> tuple[str, ...] | None:
    """The words of `trainer.reward_check`; None where there is none. Raises ConfigError."""
    if settings.reward_check is None:
        return None
    first, *rest = split_words("trainer.reward_check", settings.reward_check)
    is_python = settings.python is not None and PYTHON.fullmatch(first)
    return (settings.python if is_python and settings.python else first, *rest)


def split_words(key: str, text: str | None) -> list[str]:
    """As a shell splits them. Raises ConfigError."""
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise ConfigError(f"{key}={text}: {error}", f"close the quotes in {key}") from error
    if not words:
        raise ConfigError(
            f"{key}={as_typed(text)}: nothing to run", f"set {key}, e.g. {key}='python train.py --seed 1'"
        )
    return words


def _pattern(text: str | None) -> re.Pattern[str]:
    hint = (
        r'set trainer.metrics to its JSONL file, or trainer.pattern, e.g. "step (?P<step>\d+).*reward (?P<reward>\S+)"'
    )
    if text is None:
        raise ConfigError("trainer.pattern=null and trainer.metrics=null: its steps can't be seen", hint)
    return _compiled("step", text, key="pattern", hint=hint)


def _compiled(
    group: str, text: str, *, key: str = "reward_pattern", hint: str = r'e.g. "Avg Reward: (?P<reward>\S+)"'
) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ConfigError(f"trainer.{key}={text}: {error}", hint) from error
    if group not in pattern.groupindex:
        raise ConfigError(f"trainer.{key}={text}: it has no group (?P<{group}>…)", hint)
    return pattern


def _checkpoint_pattern(settings: ForeignTrainerConfig) -> Path | None:
    given = settings.checkpoints
    if given is None:
        for key in ("checkpoint_file", "resume", "tracker"):
            if getattr(settings, key) is not None:
                raise ConfigError(
                    f"trainer.{key} is set and trainer.checkpoints is not", "set trainer.checkpoints, e.g. out/step-*"
                )
        return None
    path = Path(settings.cwd) / given
    if given.count(STEP) != 1 or STEP not in path.name or not path.is_relative_to(settings.cwd):
        raise ConfigError(
            f"trainer.checkpoints={given}: a path below trainer.cwd with one * for the step, in its last part",
            "e.g. out/checkpoint-*",
        )
    if settings.resume is not None and STEP not in settings.resume and settings.tracker is None:
        raise ConfigError(f"trainer.resume={settings.resume}: without * for the checkpoint's path", "e.g. '--resume *'")
    return path


def changed_at(path: Path) -> float:
    """Of a folder's files too. What the trainer removes meanwhile is passed over: it is looked at again."""
    newest = 0.0
    for one in (path, *(Path(folder, name) for folder, *names in os.walk(path) for name in itertools.chain(*names))):
        with contextlib.suppress(OSError):
            newest = max(newest, one.stat().st_mtime)
    return newest
