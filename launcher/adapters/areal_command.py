"""The command that starts AReaL's trainer: by its local launcher, or by torchrun with the addresses of servers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from launcher.adapters.areal_settings import LAUNCHERS, ArealSettings, launch_module
from launcher.adapters.trainer_adapter import TrainerCommand
from launcher.config.foreign import ForeignTrainerConfig

ADDRESSES = "AREAL_LLM_SERVER_ADDRS"
TO_ITS_TRAINER = {"AREAL_SPMD_MODE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What AReaL's local launcher gives its trainer, beside the addresses."""
ONCE = "++recover.retries=0"
"""Its local launcher starts a run that has ended again, also one that ended well."""


def areal_command(
    trainer: ForeignTrainerConfig,
    settings: ArealSettings,
    script: Sequence[str],
    *,
    addresses: Sequence[str] | None = None,
    port: int = 0,
    extra: Sequence[str] = (),
) -> TrainerCommand:
    """`script`: their training script with its own arguments. `addresses`: ip:port of servers; None: AReaL starts its
    own. `port`: for torchrun's ranks to meet. `extra`: overrides behind theirs."""
    its = (*script, "--config", settings.config, *settings.overrides)
    variables = {name: str(value) for name, value in trainer.env.items()}
    python = trainer.python or "python3"
    if trainer.python is not None:  # its launcher calls python3 and torchrun by their names
        path = variables.get("PATH", os.environ.get("PATH", os.defpath))
        variables["PATH"] = f"{Path(trainer.python).expanduser().parent}{os.pathsep}{path}"
    variables = {"PYTHONUNBUFFERED": "1", **variables}
    if addresses is None:
        module = launch_module(trainer.python, trainer.env) or LAUNCHERS[0].removesuffix(".py").replace("/", ".")
        words = (python, "-m", module, *its, ONCE, *extra)
    else:
        torchrun = ("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(settings.ranks))
        meeting = ("--master-addr", "localhost", "--master-port", str(port))
        words = (python, *torchrun, *meeting, *its, *extra)
        variables |= {**TO_ITS_TRAINER, ADDRESSES: ",".join(addresses)}
    return TrainerCommand(words=words, cwd=Path(trainer.cwd), variables=variables)
