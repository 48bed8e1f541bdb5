"""The command that starts AReaL's trainer: by its local launcher, or by torchrun with the addresses of servers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from launcher.adapters.areal_settings import LAUNCHERS, ArealSettings, launch_module
from launcher.adapters.trainer_adapter import TrainerCommand
from launcher.config.foreign import SERVERS, ForeignTrainerConfig

ADDRESSES = "AREAL_LLM_SERVER_ADDRS"
TO_ITS_TRAINER = {"AREAL_SPMD_MODE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What AReaL's local launcher gives its trainer, beside the addresses."""
ONCE = "++recover.retries=0"
"""Its local launcher starts a run that has ended again, also one that ended well."""


def areal_command(
    trainer: ForeignTrainerConfig, settings: ArealSettings, script: Sequence[str], *, extra: Sequence[str] = ()
) -> TrainerCommand:
    """`script`: their training script with its own arguments. `extra`: overrides behind theirs. With
    trainer.rung=servers the trainer alone; who starts it gives it the addresses of servers.

    AReaL's launcher clears the trial's records before each start. A trainer that finds those of a killed one asks for
    weights that are not written yet, and ends with an error where it would write the same record. It would also write
    into weights that the door has linked."""
    its = (*script, "--config", settings.config, *settings.overrides)
    variables = {name: str(value) for name, value in trainer.env.items()}
    python = trainer.python or "python3"
    if trainer.python is not None:  # its launcher calls python3 and torchrun by their names
        path = variables.get("PATH", os.environ.get("PATH", os.defpath))
        variables["PATH"] = f"{Path(trainer.python).expanduser().parent}{os.pathsep}{path}"
    variables = {"PYTHONUNBUFFERED": "1", **variables}
    if trainer.rung != SERVERS:
        module = launch_module(trainer.python, trainer.env) or LAUNCHERS[0].removesuffix(".py").replace("/", ".")
        words = (python, "-m", module, *its, ONCE, *extra)
    else:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.ranks))
        words = (python, *torchrun, *its, *extra)
        variables |= TO_ITS_TRAINER
    cwd, removes = Path(trainer.cwd), list[Path]()
    if trainer.rung == SERVERS:
        records = settings.records(trainer.python, trainer.env)
        removes = [] if records is None else [cwd / records]
        removes += settings.paths.default_checkpoints.glob("weight_update_v*")
    return TrainerCommand(words=words, cwd=cwd, variables=variables, removes=tuple(removes))
