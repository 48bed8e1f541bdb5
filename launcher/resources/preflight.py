"""What this machine and these files lack, found before anything is started and said in one message.

Each check yields what is missing instead of raising at the first: whoever moves a run to a new machine wants the
whole list. Nothing is created by looking (an existence check that creates what it looks for is a known trap).
The records of a data set, and the checkpoint to resume from, are looked at by the driver.
"""

from __future__ import annotations

from collections.abc import Iterator

from launcher.base.errors import UsageError
from launcher.checkpoints.uploads import remote_of
from launcher.config.schema import RunConfig
from launcher.resources.hardware import Hardware
from launcher.resources.missing_files import missing_data, missing_models
from launcher.resources.missing_machine import missing_gpus, missing_login, missing_memory, missing_ports, missing_room
from launcher.resources.reward_import import missing_reward
from launcher.resources.run_plan import RunPlan


def preflight(config: RunConfig, hardware: Hardware, plan: RunPlan) -> None:
    """Raises the one UsageError there is, or a UsageError that lists all."""
    missing = find_missing(config, hardware, plan)
    if len(missing) == 1:
        raise missing[0]
    if missing:
        listed = "\n".join(f"{number}. {_indented(error)}" for number, error in enumerate(missing, 1))
        raise UsageError(
            f"{len(missing)} things are missing before this run can start:\n{listed}",
            "nothing was started; the same command with dry_run=true shows the plan",
        )


def find_missing(config: RunConfig, hardware: Hardware, plan: RunPlan) -> list[UsageError]:
    """Everything that keeps this run from starting here, each with what to change. `plan` is of this hardware."""
    here = config.cluster.address == "local"  # else servers and trainer run on machines that can't be seen from here
    known = here or plan.is_described
    return [
        *(missing_gpus(config, hardware, plan) if known else ()),
        *(missing_memory(plan) if known else ()),
        *missing_models(config, plan.shape),
        *missing_data(config),
        *missing_reward(config),
        *missing_room(config, plan),
        *(missing_ports(config) if here else ()),
        *missing_login(config),
        *_missing_protocol(config),
    ]


def _missing_protocol(config: RunConfig) -> Iterator[UsageError]:
    """What recover.url needs to be spoken to; whether it may be written is asked when the run begins."""
    try:
        remote_of(config)
    except UsageError as error:
        yield error


def _indented(error: UsageError) -> str:
    return str(error).replace("\n", "\n   ")
