"""The checkpoints of another project's trainer, as a catalogue for the plan: which are whole, and the others set aside.

Nothing is deleted. Before each start every checkpoint later than the one to resume from is moved to `set_aside/` beside
it: the trainer would write into it again, and a kill meanwhile would leave a mixture that looks whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.foreign.foreign_process import run_to_end
from actors.supervision.run_history import RunHistory
from launcher.adapters.foreign_health import (
    NOT_OURS,
    Unproven,
    facts_of,
    points_of,
    report_every,
    unproven_of,
    why_not_whole,
)
from launcher.adapters.trainer_adapter import FoundCheckpoint, TrainerAdapter
from launcher.base.errors import CheckpointError, DiskError, ModelError, RunError
from launcher.base.messages import Incident
from launcher.checkpoints.checkpoint_folder import why_unread
from launcher.checkpoints.tensor_files import read_entries
from launcher.config.schema import RunConfig
from launcher.policy.checkpoint_status import CheckpointFacts
from launcher.policy.restore import FIRST_WEIGHTS, choose, for_reports
from launcher.policy.reward_health import has_learned
from launcher.run_files.journal import Record, number_of
from launcher.run_files.run_paths import RunPaths

ASIDE = "set_aside"
DAMAGED, CONDEMNED, SUPERSEDED, CONTRADICTED = "damaged", "condemned", "superseded", "contradicted"
UNPROVEN = "unproven"
"""Why one is set aside, in its new name; the last: nobody knows yet whether a step of sound rewards was in it."""
DISK_HINT = (
    "look at its disk: the same command resumes when it is back; to begin anew without them give another trial_name"
)
STEPS_WITHOUT = 100
"""So many steps without a checkpoint are told."""
Moved = list[tuple[Path, Path]]
"""Each path with its new one, of a start and those that repeat it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOnDisk:
    """What one reading found. `problems`: of those that are not whole; `damage`: of those whose tensors can't be
    loaded; `unread`: why the disk does not give the tensors of one, "" where it gives all."""

    found: tuple[FoundCheckpoint, ...]
    problems: Mapping[Path, str]
    damage: Mapping[Path, str]
    unread: str


class ForeignCheckpoints:
    """`read` and `facts` for the choice; then `check`, `prepare` and `clear`, which moves the others. `put_back` undoes
    the last clear.
    `unproven`: which are passed over at the next start. Whether there were any is in the run's memory, so that an
    attempt that finds none knows it."""

    def __init__(
        self,
        config: RunConfig,
        adapter: TrainerAdapter,
        history: RunHistory,
        *,
        are_ours: bool,
        unproven: Unproven | None = None,
        paths: RunPaths | None = None,
    ) -> None:
        """`are_ours`: the run has started the command before, so what is not whole is what it left."""
        self.are_ours = are_ours
        self.unproven = unproven
        self._config = config
        self._paths = paths or RunPaths.of(config)
        self._adapter = adapter
        self._history = history
        self._found: Sequence[FoundCheckpoint] = ()
        self._problems: dict[Path, str] = {}
        self._moved, self._was_prepared, self._were_there = left_by_predecessors(history.command_events)
        self._is_recorded = self._were_there

    def started(self) -> None:
        """What lies there from now on is the run's own, and made after a start from what was sound."""
        self.are_ours = True
        self.unproven = None

    def proven(self, lines: Sequence[Record]) -> Sequence[Record]:
        """The lines of metrics.jsonl without those of steps that the next start undoes."""
        if self.unproven is None:
            return lines
        return [line for line in lines if number_of(line.get("global_step")) <= self.unproven.restored_step]

    def path_of(self, step: int) -> Path | None:
        found = self._of(step)
        return None if found is None else found.path

    def _of(self, step: int) -> FoundCheckpoint | None:
        """The one to resume from, of those that are whole."""
        whole = [one for one in self._usable if one.step == step and one.path not in self._problems]
        return max(whole, key=lambda one: one.has_optimizer, default=None)

    @property
    def _is_again(self) -> bool:
        """The next start repeats one that set aside what can come back."""
        return self.unproven is not None and not self.unproven.is_contradicted

    def seen(self) -> Sequence[FoundCheckpoint]:
        """While the trainer runs, on a thread: all that lie there, or none where they can't be read."""
        with contextlib.suppress(OSError):
            found = self._adapter.checkpoints()
            self._were_there = self._were_there or any(one.is_whole is not False for one in found)
            return found
        return ()

    def look_for_proof(self, steps: int) -> str:
        """While the trainer runs: record that it has one; what makes doubtful that it ever will, "" where nothing does.

        `steps`: that it has gone through."""
        if self._were_there:
            if not self._is_recorded:
                self._is_recorded = True
                self._history.event("checkpoint.found", subject="checkpoints", reason="the trainer has one")
        elif steps >= STEPS_WITHOUT and (given := self._config.trainer.checkpoints) is not None:
            setting = f"trainer.checkpoints={given}"
            return f"no checkpoint was seen in {STEPS_WITHOUT} steps, a restart would begin anew: check {setting}"
        return ""

    def read(self, lines: Sequence[Record]) -> FoundOnDisk:
        """On a thread: what lies there, and what keeps each from being resumed from. Raises DiskError where the disk
        gives none of those that were there, which is not the same as none.

        `lines`: the current ones of metrics.jsonl."""
        try:
            found = self._adapter.checkpoints()
        except OSError as error:
            reason = f"the trainer's checkpoints can't be read: {error.strerror or error}"
            raise DiskError(reason, DISK_HINT) from error
        whys = {one.path: why_not_whole(one, lines) for one in found}
        problems = {path: why for path, why in whys.items() if why}
        if not found and self._were_there:
            raise DiskError("of the trainer's checkpoints, which were there, none is any more", DISK_HINT)
        if len(problems) == len(found) and (why := unread_in(found)):
            raise DiskError(why, DISK_HINT)
        damage: dict[Path, str] = {}
        unread = ""
        for one in found:
            if one.path in problems or one.no_resume:
                continue
            try:
                if problem := damage_in(one.path):
                    damage[one.path] = problem
            except DiskError as error:  # damaged, where the disk gives another
                damage[one.path] = unread = error.message
        if unread and all(one.no_resume or one.path in problems or one.path in damage for one in found):
            raise DiskError(unread, DISK_HINT)
        return FoundOnDisk(found=tuple(found), problems=problems, damage=damage, unread=unread)

    def facts(
        self, read: FoundOnDisk, lines: Sequence[Record], incident: Incident | None
    ) -> tuple[CheckpointFacts, ...] | None:
        """For the choice of a restore; those with an optimizer alone, where one of them may be chosen. None where one
        that the disk does not give now might be, and no other."""
        if self.unproven is None:  # what a trainer saved whose restore was not borne out when it ended
            self.unproven = unproven_of(self._history.command_events)
        self._found = read.found
        self._problems = {**read.problems, **read.damage}
        if self.unproven is not None:
            kept_out = [one.path for one in self._found if self.unproven.holds_of(one)]
            self._problems = dict.fromkeys(kept_out, self.unproven.why) | self._problems
        self._tell_damaged(read.damage)
        for among in ([one for one in self._usable if one.has_optimizer], self._usable):
            facts = tuple(facts_of(among, self._problems, lines, self._config))
            settings = for_reports(self._config.restore, report_every(lines))
            if choose(facts, incident, self._history.attempts, settings).global_step not in (None, FIRST_WEIGHTS):
                return facts
        return None if read.unread else facts

    def _tell_damaged(self, damage: Mapping[Path, str]) -> None:
        """Of those that would have been chosen, were they not."""
        whole = max((one.step for one in self._usable if one.path not in self._problems), default=FIRST_WEIGHTS)
        known = self._history.memory.damaged_checkpoints
        for one in self._found:
            if one.path in damage and one.step > whole and one.changed_at not in known.get(one.step, ()):
                self._history.found_damaged(one.step, (one.changed_at,), damage[one.path])

    def check(self, step: int, lines: Sequence[Record]) -> None:
        """Before anything is moved. Raises RunError: the run halts; CheckpointError: another one has to be chosen."""
        if step != FIRST_WEIGHTS and self._of(step) is None:
            raise CheckpointError(f"the checkpoint of step {step} is not there any more", "another one is chosen")
        if not self.are_ours and (unknown := [one for one in self._found if one.path in self._problems]):
            why = self._problems[unknown[-1].path]
            raise RunError(f"{unknown[-1].path}: {why}, and this run has not made it; nothing is moved", NOT_OURS)
        if not self.are_ours and self._found and not self._usable:
            unused = self._found[-1]
            raise RunError(
                f"{unused.path}: {unused.no_resume}; this run has not made it, would begin at step 0 and write over it",
                "move it away, or give another trial_name",
            )
        unproven = self.unproven
        if unproven is not None and step == FIRST_WEIGHTS and not self._may_begin_anew(lines):
            raise RunError(
                f"no checkpoint is left from before step {unproven.onset_step}; {unproven.why}",
                f"choose one by hand, also of {ASIDE}/, or begin anew with another trial_name",
            )

    def _may_begin_anew(self, lines: Sequence[Record]) -> bool:
        """Where known answers accused the reward function, and nothing was learned before: a contradicted restore shows
        less (P12)."""
        unproven, config = self.unproven, self._config
        if unproven is None or unproven.since is not None or not config.restore.begin_anew:
            return False
        return not has_learned(points_of(lines), unproven.onset_step, config.reward_health)

    @property
    def _usable(self) -> Sequence[FoundCheckpoint]:
        return [one for one in self._found if not one.no_resume]

    async def prepare(self, step: int, lines: Sequence[Record]) -> None:
        """Make of the chosen checkpoint what the trainer resumes from. Raises RunError."""
        chosen = self._of(step)
        self._was_prepared = self._was_prepared and self._is_again
        if chosen is None or (command := self._adapter.preparation(chosen.path)) is None:
            return
        before = {one.path: one.changed_at for one in self._found}
        exit_code, said = await run_to_end(command, self._paths)
        if exit_code != 0:
            raise RunError(f"{chosen.path} could not be prepared for a resume: {said}", "its words say what to do")
        self._was_prepared = True
        reason = "" if chosen.has_optimizer else "it has no optimizer: the trainer begins with a fresh one"
        self._history.event("checkpoint.prepared", subject="checkpoints", reason=reason, global_step=step)
        self.facts(await asyncio.to_thread(self.read, lines), lines, None)
        for one in self._found:
            if one.step == step and one.changed_at != before.get(one.path) and self._is_kept_out(one):
                del self._problems[one.path]  # it is new by the preparation, and not by what was contradicted

    async def clear(self, *, after: int, is_condemned: bool) -> None:
        """Set aside every one that is later than a step, or not whole. Raises RunError."""
        moved: Moved = []
        if not self._is_again:
            self._moved = moved
        for one in self._found:
            if one.step > after or one.path in self._problems:
                why = self._why_aside(one, is_condemned=is_condemned)
                try:
                    for path in (one.path, *one.with_it):
                        moved.append(await asyncio.to_thread(set_aside, path, why, one.path.parent / ASIDE))
                except OSError as error:
                    raise RunError(
                        f"{one.path} can't be moved: {error.strerror}", "make its folder writable"
                    ) from error
        gone = {path for path, _ in moved}
        self._were_there = any(one.path not in gone for one in self._found)
        if moved:
            names = [path.name for path, _ in moved]
            facts: dict[str, object] = {"is_one_left": self._were_there}
            if not self._is_again:
                facts["moved"] = [[str(path), str(target)] for path, target in moved]
            self._is_recorded = self._were_there
            name = "checkpoint.condemned" if is_condemned else "checkpoint.set_aside"
            torn = [one for one in self._found if one.path in self._problems and not self._is_kept_out(one)]
            why = "".join(f"; {one.path.name}: {self._problems[one.path]}" for one in torn[-1:])
            reason = f"after step {after}{why}"
            self._history.event(name, subject="checkpoints", reason=reason, checkpoints=names, **facts)

    def _is_kept_out(self, one: FoundCheckpoint) -> bool:
        return self.unproven is not None and self._problems.get(one.path) == self.unproven.why

    def _why_aside(self, one: FoundCheckpoint, *, is_condemned: bool) -> str:
        if (unproven := self.unproven) is not None and self._is_kept_out(one):
            return (UNPROVEN if self._is_again else CONTRADICTED) if unproven.is_made_by_it(one) else SUPERSEDED
        if one.path in self._problems:
            return DAMAGED
        return CONDEMNED if is_condemned else SUPERSEDED

    async def put_back(self) -> None:
        """Those that were whole; what a contradicted trainer has written in their place is set aside."""
        back = []
        if self._was_prepared and (command := self._adapter.preparation(None)) is not None:
            self._was_prepared = False
            await self._make_room()
            exit_code, said = await run_to_end(command, self._paths)
            if exit_code != 0:
                self._history.event("checkpoint.prepared", subject="checkpoints", reason=f"not taken back: {said}")
        for path, target in self._moved:
            if target.exists() and not any(f".{why}-" in target.name for why in (DAMAGED, CONTRADICTED)):
                try:
                    if path.exists():
                        await asyncio.to_thread(set_aside, path, CONTRADICTED, path.parent / ASIDE)
                    await asyncio.to_thread(target.rename, path)
                except OSError:  # it stays where it is, and is not among the names
                    continue
                back.append(path.name)
        self._moved = []
        if back:
            reason = "the weights were not what changed"
            self._history.event("checkpoint.reinstated", subject="checkpoints", reason=reason, checkpoints=back)

    async def _make_room(self) -> None:
        """Where a contradicted trainer has written into what was prepared for it."""
        unproven = self.unproven
        for one in await asyncio.to_thread(self.seen):
            if unproven is not None and unproven.is_made_by_it(one) and one.with_it:
                for path in (one.path, *one.with_it):
                    with contextlib.suppress(OSError):  # then it is not taken back either, which is said
                        await asyncio.to_thread(set_aside, path, CONTRADICTED, one.path.parent / ASIDE)


def damage_in(path: Path) -> str:
    """Why the safetensors files of a checkpoint can't be loaded; "" where they can, or there are none. No other format
    is read: pickled files would be executed. Raises DiskError where its disk does not give it."""
    for file in sorted(path.rglob("*.safetensors")):
        try:
            read_entries(file)
        except ModelError as error:
            if isinstance(error.__cause__, OSError):
                raise DiskError(error.message, DISK_HINT) from error
            return error.message
    return ""


def unread_in(found: Sequence[FoundCheckpoint]) -> str:
    """Why the disk does not give a file of theirs; "" where it gives all."""
    with contextlib.suppress(FileNotFoundError):  # some file has just been removed
        files = (file for one in found for file in (one.path, *one.path.rglob("*")) if file.is_file())
        return next(filter(None, map(why_unread, files)), "")
    return ""


def set_aside(path: Path, why: str, folder: Path) -> tuple[Path, Path]:
    """Move it; returns its path and the new one. Raises OSError."""
    folder.mkdir(exist_ok=True)
    names = (folder / f"{path.name}.{why}-{number}" for number in itertools.count(1))
    return path, path.rename(next(name for name in names if not name.exists()))


def left_by_predecessors(events: Iterable[Record]) -> tuple[Moved, bool, bool]:
    """What was set aside since a step of the run was last taken for sound, whether a checkpoint was prepared, so that
    the successor of a killed supervisor can put them back; and whether there was a checkpoint."""
    moved: Moved = []
    was_prepared = were_there = False
    for event in events:
        match event.get("event"):
            case "trainer.stepped" | "run.running":  # versions before this one have the second alone
                moved, was_prepared = [], False
            case "checkpoint.reinstated":
                moved, was_prepared, were_there = [], False, True
            case "checkpoint.found":
                were_there = True
            case "checkpoint.prepared":
                was_prepared = event.get("global_step") is not None
            case "checkpoint.condemned" | "checkpoint.set_aside":
                were_there = event.get("is_one_left") is True
                if isinstance(pairs := event.get("moved"), list):
                    moved = [(Path(path), Path(target)) for path, target in pairs]
    return moved, was_prepared, were_there
