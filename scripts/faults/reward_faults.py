"""Faults of the reward function (S1, S2, S3, T3, X-reward): the injector's side of the switch in switched_reward.py."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from launcher.base.durable import replace_file
from launcher.base.errors import UsageError
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_settings, setting_of
from scripts.faults.broken_reward import FUNCTION, SOLVE, VARIABLE, fired
from scripts.faults.declaration import SO_LONG, FaultContext, Figures, Inject, Option, fault, seconds, setting
from scripts.run_processes import RunProcesses, environment

HOW_TO = (
    f"start the run with {VARIABLE}=<an absolute file name> in its environment and reward.fn={FUNCTION}, or for "
    f"conf=arithmetic_tool_cpu with rollout.episode={SOLVE}"
)


def find_switch(paths: RunPaths, found: RunProcesses) -> Path:
    """The file that this run's reward function reads. Raises UsageError where it reads none."""
    episode = setting_of(read_settings(paths.config), "rollout.episode")
    if (fn := episode or setting(paths, "reward.fn")) not in {FUNCTION, SOLVE}:
        raise UsageError(
            f"this run's {'rollout.episode' if episode else 'reward.fn'} is {fn}, which has no switch", HOW_TO
        )
    switch = environment(found.driver).get(VARIABLE, "")
    if not Path(switch).is_absolute():
        raise UsageError(f"this run was started with {VARIABLE}={switch!r}", HOW_TO)
    return Path(switch)


@contextlib.contextmanager
def switched_on(switch: Path, what: dict[str, object]) -> Iterator[None]:
    """The reward function does that within the block, and what it always did after it."""
    switch.parent.mkdir(parents=True, exist_ok=True)
    replace_file(switch, json.dumps(what).encode())
    try:
        yield
    finally:
        switch.unlink(missing_ok=True)


def switch_reward(do: str = "") -> Inject:
    """Have the reward function `do` that for a time; without it, what the option `how` names."""

    def inject(context: FaultContext) -> Figures:
        switch = find_switch(context.paths, context.found)
        what: dict[str, object] = {"do": do or context.word("how"), "seed": context.draw.randrange(2**31)}
        what |= {name: context.options[name] for name in ("share", "stall_s") if name in context.options}
        times = context.count_hits("completions", lambda: fired(switch), switched_on(switch, what))
        return {"target": "reward function", **what, "completions": times}

    return inject


def _switched(code: str, what: str, do: str = "", *, role: str = "run", **options: Option) -> None:
    declare = fault(code, what, role=role, noticed_as="reward", needs="switch", check=find_switch, **options)
    declare(switch_reward(do))


_switched("S1", "rewards always 0", "zero", seconds=seconds(60.0, SO_LONG))
_switched(
    "S2",
    "a share of the rewards silently 0",
    "share",
    share=Option(0.3, "of the completions", least=0.001),
    seconds=seconds(60.0, SO_LONG),
)
_switched(
    "S3",
    "rewards always 1, or the reward function raises, or never returns",
    how=Option("one", "which of them", ("one", "raise", "hang")),
    seconds=seconds(60.0, SO_LONG),
)
_switched(
    "T3",
    "poisoned batch: rewards whose sum overflows (a poisoned parameter is out of reach: the trainer has no call that "
    "would write one)",
    "huge",
    role="trainer",
    share=Option(0.25, "of the prompts", least=0.001),
    seconds=seconds(0.5, SO_LONG),
)
_switched(
    "X-reward",
    "trap: the reward function stalls, once in each of its processes",
    "stall",
    stall_s=seconds(5.0, "of one stall"),
    seconds=seconds(10.0, "in which it may begin"),
)
