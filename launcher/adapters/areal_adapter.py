"""AReaL's trainer, unchanged: its step tables, its exports and its recover folder.

It is started as a single controller (`scheduler.type=local`: its script starts workers and servers), or by AReaL's
legacy launcher. Its recover folder (recover_info/ and default/recover_checkpoint/) is what it resumes from by itself.
An export is made into one by `scripts.setup_recovery` before; it has no optimizer. Seen with AReaL 1.0.4.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.adapters.areal_settings import RESUMING_MODES, areal_settings
from launcher.adapters.command_adapter import MOST_REST, PYTHON, changed_at, split_words, step_seen
from launcher.adapters.trainer_adapter import FoundCheckpoint, StepSeen, TrainerCommand
from launcher.base.errors import ConfigError, ResourceError, StorageError, UsageError
from launcher.checkpoints.areal_folders import (
    DATA_FILE,
    METADATA,
    SUPERVISED,
    RecoverInfo,
    pickle_problems,
    read_recover_info,
)
from launcher.checkpoints.areal_log import STEP_LINE, StepTable, read_step, unfinished
from launcher.checkpoints.checkpoint_catalog import find_problem
from launcher.checkpoints.checkpoint_folder import CheckpointName, read_checkpoint
from launcher.config.compose import REPOSITORY
from launcher.config.foreign import SERVERS, ForeignTrainerConfig
from launcher.config.settings import as_typed

LAUNCHER = "areal.infra.launcher.local"
"""Its legacy launcher on one machine. The single controller came with the same version, 1.0."""
REWARDS = ("task_reward/avg", "rollout/reward")
FINITE = ("grad_norm", "actor_loss/avg")
"""Ends of keys, whose beginning differs with AReaL's version; the first that is there counts."""
NO_OPTIMIZER = "++recover.no_load_optim=true"
ADDRESSES = "AREAL_LLM_SERVER_ADDRS"
SPMD_MODE = "AREAL_SPMD_MODE"
"""1: somebody else has started the servers; else the script is a single controller."""
TO_ITS_TRAINER = {SPMD_MODE: "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What AReaL's legacy launcher gives its trainer, beside the addresses."""
ONCE = "++recover.retries=0"
"""Its legacy launcher starts a run that has ended again, also one that ended well."""
CONTROLLERS_LOG = "main.log"
PROCESSES = "areal."
"""The beginning of the module of each worker and server that a single controller starts."""
SEEN = "1.0"
OF_BEFORE_0_4 = "an AReaL before 0.4 has written it, and a later one loads DCP alone"
UNUSED = ("metrics", "pattern", "resume", "checkpoints", "checkpoint_file")


class ArealAdapter:
    """Raises ConfigError with the first setting that can't be used."""

    def __init__(self, trainer: ForeignTrainerConfig) -> None:
        for key in UNUSED:
            if getattr(trainer, key) is not None:
                raise ConfigError(f"trainer.{key} is set with trainer.adapter=areal, whose YAML says it", "set null")
        self._trainer = trainer
        self._settings = areal_settings(trainer)
        self._paths = self._settings.paths
        self._is_single = self._settings.is_single_controller and trainer.rung != SERVERS
        words = split_words("trainer.command", trainer.command or "train.py")
        self._script = words[1:] if PYTHON.fullmatch(words[0]) else words
        if not self._script:
            raise ConfigError(f"trainer.command={trainer.command} names no script", "give the training script")
        self.stop_s = trainer.stop_s
        log = self._paths.logs / CONTROLLERS_LOG if self._is_single else self._paths.trainer_log
        self.source: Path | None = None if trainer.rung == SERVERS else log
        self.reads = "trainer.adapter=areal (the step tables of its StatsLogger)"
        self._known: dict[Path, FoundCheckpoint] = {}

    def plan(self) -> Iterator[str]:
        settings, paths = self._settings, self._paths
        how = "as a single controller" if self._is_single else "by its legacy launcher"
        started = "" if self._trainer.rung == SERVERS else f", started {how}"
        yield f"{self._name}: its trial {paths.experiment_name}/{paths.trial_name} in {paths.fileroot}{started}"
        if (number := self._number) and not number.startswith(SEEN):
            yield f"note: AReaL {number} was not run under this launcher; {SEEN} was"
        if not settings.recovers:
            given, modes = settings.values["recover.mode"], " or ".join(map(str, RESUMING_MODES[:2]))
            yield (
                f"note: {settings.config}: recover.mode or recover.freq_* is off (recover.mode={given}): after a "
                f"failure it starts over; it resumes with recover.mode={modes} and e.g. recover.freq_steps=5"
            )
        elif not settings.exports:
            yield f"note: {settings.config}: saver.freq_* is off: after a collapse only its recover folder may be sound"
        yield f"checkpoints: {paths.checkpoints}; it resumes from its recover folder, or an export (no optimizer)"

    def missing(self) -> Iterator[UsageError]:
        trainer, cwd = self._trainer, Path(self._trainer.cwd)
        python = trainer.python or "python3"
        path = str(trainer.env.get("PATH", os.environ.get("PATH", os.defpath)))
        if shutil.which(python, path=path) is None:
            yield ResourceError(f"trainer.python: {python} can't be run here", "give the path of AReaL's interpreter")
        elif not has_areal(trainer.python, trainer.env):
            what = f"AReaL {self._number} there is older than 1.0" if self._number else "no AReaL is installed there"
            yield ResourceError(
                f"trainer.python={as_typed(trainer.python)}: {what}",
                "give the interpreter of one that has AReaL 1.0 or later",
            )
        if not (cwd / self._script[0]).is_file():
            yield StorageError(
                f"trainer.command: {cwd / self._script[0]} is no file", "give the training script, from trainer.cwd"
            )
        if ADDRESSES in {**os.environ, **trainer.env}:
            yield ConfigError(f"{ADDRESSES} is set, and this launcher says where servers are", f"unset {ADDRESSES}")
        values = self._settings.values
        mode, records = values["actor.weight_update_mode"], values["cluster.name_resolve.type"]
        if trainer.rung == SERVERS and records not in (None, "nfs"):
            yield ConfigError(
                f"{trainer.config}: cluster.name_resolve.type={records}: a killed trainer's records stay there",
                "set cluster.name_resolve.type=nfs there or behind --",
            )
        if trainer.rung == SERVERS and not (mode == "disk" and trainer.addresses_env == ADDRESSES):
            yield ConfigError(
                f"{trainer.config}: actor.weight_update_mode={mode}, trainer.addresses_env={trainer.addresses_env}: a "
                "server that is restarted can't rejoin a process group",
                f"set actor.weight_update_mode=disk there or behind --, and trainer.addresses_env={ADDRESSES}",
            )

    def command(self, resume: Path | None) -> TrainerCommand:
        """The script, which is a single controller; or AReaL's legacy launcher; or, with trainer.rung=servers, the
        trainer alone, by torchrun: who starts it gives it the addresses of servers.

        The first two clear the trial's records before each start. A trainer that finds those of a killed one asks
        for weights that are not written yet, and ends with an error where it would write the same record. It would also
        write into weights that the door has linked."""
        trainer, settings, cwd = self._trainer, self._settings, Path(self._trainer.cwd)
        its = (*self._script, "--config", settings.config, *settings.overrides, *settings.places)
        extra = (NO_OPTIMIZER,) if resume is not None and not self._recover_info().has_optimizer else ()
        variables = {name: str(value) for name, value in trainer.env.items()}
        python = trainer.python or "python3"
        if trainer.python is not None:  # AReaL calls python3 and torchrun by their names
            path = variables.get("PATH", os.environ.get("PATH", os.defpath))
            variables["PATH"] = f"{Path(trainer.python).expanduser().parent}{os.pathsep}{path}"
        variables = {"PYTHONUNBUFFERED": "1", **variables}
        if self._is_single:
            return TrainerCommand(words=(python, *its, *extra), cwd=cwd, variables={**variables, SPMD_MODE: "0"})
        if trainer.rung != SERVERS:
            words = (python, "-m", LAUNCHER, *its, ONCE, *extra)
            return TrainerCommand(words=words, cwd=cwd, variables=variables)
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.ranks))
        paths, root = settings.paths, settings.record_root
        records = cwd / root / paths.user / paths.experiment_name / paths.trial_name
        # Its own default is a folder that differs with its version, and records in it would not be found.
        its = (*its, f"++cluster.name_resolve.nfs_record_root='{root}'")
        return TrainerCommand(
            words=(python, *torchrun, *its, *extra),
            cwd=cwd,
            variables={**variables, **TO_ITS_TRAINER},
            removes=(records, *paths.default_checkpoints.glob("weight_update_v*")),
        )

    def preparation(self, resume: Path | None) -> TrainerCommand | None:
        if resume is not None and resume == self._recover_folder:
            return None
        paths = self._paths
        names = ("--experiment-name", paths.experiment_name, "--trial-name", paths.trial_name)
        which = ("--undo",) if resume is None else ("--checkpoint-path", str(resume), "--force")
        tool = (sys.executable, "-m", "scripts.setup_recovery", "--fileroot", str(paths.fileroot), *names, *which)
        return TrainerCommand(words=tool, cwd=REPOSITORY, variables={SUPERVISED: "1"})

    def is_trainer(self, words: Sequence[str]) -> bool:
        """A rank: Python with the script. torchrun, the launcher and its servers have the script further behind.
        Of a single controller, which is the command itself, each worker and server: it notices none that is lost."""
        begin = [word for word in words[1:4] if word != "-u"]
        if self._is_single:
            return len(begin) > 1 and begin[0] == "-m" and begin[1].startswith(PROCESSES)
        return bool(begin) and Path(begin[0]).name == Path(self._script[0]).name

    def is_done(self, exit_code: int | None, last_step: int | None, total_steps: int | None) -> bool:
        """Its legacy launcher ends with 1 in any case."""
        total = min((count for count in (total_steps, self._settings.total_steps) if count), default=None)
        has_all_steps = last_step is not None and total is not None and last_step + 1 >= total
        return has_all_steps or (self._is_single and exit_code == 0)

    def read(self, text: str) -> tuple[Sequence[StepSeen], str]:
        data = text.encode()
        end = len(data) - max(unfinished(data), len(data) - data.rfind(b"\n") - 1)
        starts = [data.rfind(b"\n", 0, match.start()) + 1 for match in STEP_LINE.finditer(data, 0, end)]
        tables = [read_step(data, start, next_) for start, next_ in itertools.pairwise([*starts, end])]
        found = [step for table in tables if table is not None and (step := _step_of(table)) is not None]
        return found, data[end:].decode()[-MOST_REST:]

    def checkpoints(self) -> Sequence[FoundCheckpoint]:
        """The recover folder, and the exports; of the same step the recover folder comes first."""
        if not self._settings.recovers:
            return []
        found = [] if (own := self._recover_checkpoint()) is None else [own]
        no_resume = next(iter(pickle_problems(self._info / DATA_FILE)), "")
        for path in self._paths.default_checkpoints.glob("epoch*"):
            if (name := CheckpointName.parse(path.name)) is not None:
                found.append(self._export(path, name, no_resume))
        return sorted(found, key=lambda one: (one.step, one.path != self._recover_folder))

    @property
    def _number(self) -> str:
        return areal_number(self._trainer.python, self._trainer.env)

    @property
    def _name(self) -> str:
        return f"AReaL {self._number or 'of an unknown version'}"

    @property
    def _info(self) -> Path:
        return self._paths.checkpoints / "recover_info"

    @property
    def _recover_folder(self) -> Path:
        return self._paths.default_checkpoints / "recover_checkpoint"

    def _recover_info(self) -> RecoverInfo:
        return read_recover_info(self._info, self._recover_folder)

    def _recover_checkpoint(self) -> FoundCheckpoint | None:
        path, info = self._recover_folder, self._info
        if not any(file.is_file() for file in info.glob("*")):
            return None
        changed = max(changed_at(path), changed_at(info))
        if (known := self._known_as_whole(path, changed)) is None:
            read = self._recover_info()
            known = self._known[path] = FoundCheckpoint(
                step=0 if read.name is None else read.name.global_step,
                path=path,
                changed_at=changed,
                is_whole=not read.problems,
                problem=next(iter(read.problems), ""),
                with_it=(info,),
                has_optimizer=read.has_optimizer,
                no_resume="" if read.problems or (path / METADATA).is_file() else OF_BEFORE_0_4,
            )
        return known

    def _known_as_whole(self, path: Path, changed: float) -> FoundCheckpoint | None:
        """One that is not whole is read again: it may be, and the times of some disks are whole seconds."""
        known = self._known.get(path)
        return known if known is not None and known.changed_at == changed and known.is_whole else None

    def _export(self, path: Path, name: CheckpointName, no_resume: str) -> FoundCheckpoint:
        changed = changed_at(path)
        if (known := self._known_as_whole(path, changed)) is None:
            problem = find_problem(read_checkpoint(path, name))
            known = self._known[path] = FoundCheckpoint(
                step=name.global_step,
                path=path,
                changed_at=changed,
                is_whole=not problem,
                problem=problem,
                has_optimizer=False,
            )
        why = f"AReaL can't resume from an export alone: {no_resume}" if no_resume else ""
        return dataclasses.replace(known, no_resume=why)


def _step_of(table: StepTable) -> StepSeen | None:
    reward = _figure(table.values, REWARDS)
    others: dict[str, object] = {end: value for end in FINITE if (value := _figure(table.values, [end])) is not None}
    return step_seen(table.global_step, reward, others, total=table.total_steps or None)


def _figure(values: Mapping[str, float], ends: Sequence[str]) -> float | None:
    for end in ends:
        if keys := [key for key in values if key == end or key.endswith("/" + end)]:
            return values[min(keys, key=lambda key: (len(key), key))]
    return None


# ── which AReaL an environment has, as its files show it: nothing of it is imported or run ──


def has_areal(python: str | None, env: Mapping[str, object]) -> bool:
    """Whether that interpreter has an AReaL of 1.0 or later."""
    file = Path(*LAUNCHER.split(".")).with_suffix(".py")
    return any((folder / file).is_file() for folder in _import_folders(python, env))


def areal_number(python: str | None, env: Mapping[str, object]) -> str:
    """As its package says; "" where that does not show."""
    for folder in _import_folders(python, env):
        for info in folder.glob("areal-*.dist-info"):
            return info.name.split("-")[1].removesuffix(".dist")
    return ""


def _import_folders(python: str | None, env: Mapping[str, object]) -> Sequence[Path]:
    """Where that interpreter looks for packages, as far as its folder and PYTHONPATH show it."""
    given = str(env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")))
    path = str(env.get("PATH", os.environ.get("PATH", os.defpath)))
    found = shutil.which(python or "python3", path=path)
    folders = [Path(folder) for folder in given.split(os.pathsep) if folder]
    if found is not None:
        root = Path(found).parent.parent
        folders += [*root.glob("lib/python3*/site-packages"), *root.glob("lib/python3*/dist-packages")]
    return [*folders, *(place for folder in folders for place in _edited(folder))]


def _edited(folder: Path) -> Sequence[Path]:
    """Checkouts that were installed in place, as their .pth files name them."""
    lines = [line for file in folder.glob("*areal*.pth") for line in file.read_text(errors="replace").splitlines()]
    return [Path(line) for line in lines if line.startswith("/")]
