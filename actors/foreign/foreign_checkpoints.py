"""The checkpoints of another project's trainer: which are whole, which one to resume from, and the others set aside.

Nothing is deleted. Before each start every checkpoint later than the one to resume from is moved to `set_aside/` beside
it: the trainer would write into it again, and a kill meanwhile would leave a mixture that looks whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from actors.supervision.run_history import RunHistory
from launcher.adapters.foreign_health import facts_of, why_not_whole
from launcher.adapters.trainer_adapter import FoundCheckpoint, TrainerAdapter
from launcher.base.errors import ModelError, RunError
from launcher.base.messages import Incident
from launcher.checkpoints.tensor_files import read_entries
from launcher.config.schema import RunConfig
from launcher.policy.restore import choose
from launcher.run_files.journal import Record

ASIDE = "set_aside"
Moved = list[tuple[Path, Path]]
"""Each path with its new one."""


class ForeignCheckpoints:
    """`resume_from` chooses, `clear` moves the others; both record what they find. `put_back` undoes the last clear."""

    def __init__(self, config: RunConfig, adapter: TrainerAdapter, history: RunHistory, *, are_ours: bool) -> None:
        """`are_ours`: the run has started the command before, so what is not whole is what it left."""
        self.are_ours = are_ours
        self._config = config
        self._adapter = adapter
        self._history = history
        self._found: Sequence[FoundCheckpoint] = ()
        self._problems: dict[int, str] = {}
        self._moved: Moved = []

    def path_of(self, step: int) -> Path | None:
        return next((one.path for one in self._found if one.step == step), None)

    async def resume_from(self, lines: Sequence[Record], incident: Incident | None) -> int:
        """Of what the policy allows, the step of the newest whose tensors can be read. Raises RunError: the run halts.

        `lines`: the current ones of metrics.jsonl."""
        self._found = await asyncio.to_thread(self._adapter.checkpoints)
        whys = {one.step: why_not_whole(one, lines) for one in self._found}
        self._problems = {step: why for step, why in whys.items() if why}
        if not self.are_ours and (unknown := [one for one in self._found if one.step in self._problems]):
            why = self._problems[unknown[-1].step]
            raise RunError(
                f"{unknown[-1].path}: {why}, and this run has not made it; nothing is moved",
                "move it away, or set trainer.checkpoint_file to the file that is written last into each",
            )
        while True:
            facts = facts_of(self._found, self._problems, lines, self._config)
            choice = choose(facts, incident, self._history.attempts, self._config.restore)
            if choice.global_step is None:  # its hint names a tool for the launcher's own checkpoints
                reason = choice.reason.partition("; what the run had learned")[0]
                raise RunError(reason, f"choose one by hand and leave no later one: {self._config.trainer.checkpoints}")
            path = self.path_of(choice.global_step)
            problem = "" if path is None else await asyncio.to_thread(damage_in, path)
            if not problem:
                return choice.global_step
            at = next(one.changed_at for one in self._found if one.step == choice.global_step)
            self._history.found_damaged(choice.global_step, (at,), problem)
            self._problems[choice.global_step] = problem

    async def clear(self, *, after: int, is_condemned: bool) -> None:
        """Set aside every one that is later than a step, or not whole. Raises RunError."""
        self._moved = []
        for one in self._found:
            if one.step > after or one.step in self._problems:
                why = "damaged" if one.step in self._problems else "condemned" if is_condemned else "superseded"
                try:
                    self._moved.append(await asyncio.to_thread(set_aside, one.path, why))
                except OSError as error:
                    raise RunError(
                        f"{one.path} can't be moved: {error.strerror}", "make its folder writable"
                    ) from error
        if self._moved:
            names = [path.name for path, _ in self._moved]
            name = "checkpoint.condemned" if is_condemned else "checkpoint.set_aside"
            self._history.event(name, subject="checkpoints", reason=f"after step {after}", checkpoints=names)

    async def put_back(self) -> None:
        """Those that were whole, where nothing has taken their place."""
        back = []
        for path, target in self._moved:
            if target.exists() and not path.exists() and ".damaged-" not in target.name:
                try:
                    await asyncio.to_thread(target.rename, path)
                except OSError:  # it stays where it is, and is not among the names
                    continue
                back.append(path.name)
        self._moved = []
        if back:
            reason = "the weights were not what changed"
            self._history.event("checkpoint.reinstated", subject="checkpoints", reason=reason, checkpoints=back)


def damage_in(path: Path) -> str:
    """Why the safetensors files of a checkpoint can't be loaded; "" where they can, or there are none. No other format
    is read: pickled files would be executed."""
    for file in sorted(path.rglob("*.safetensors")):
        try:
            read_entries(file)
        except ModelError as error:
            return error.message
    return ""


def set_aside(path: Path, why: str) -> tuple[Path, Path]:
    """Move it; returns its path and the new one. Raises OSError."""
    folder = path.parent / ASIDE
    folder.mkdir(exist_ok=True)
    number = 1
    while (target := folder / f"{path.name}.{why}-{number}").exists():
        number += 1
    path.rename(target)
    return path, target
