"""The injector's side of the switch that breaks a reward function; see switched_reward.py."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from launcher.base.durable import replace_file
from launcher.base.errors import UsageError
from launcher.run_files.run_paths import RunPaths
from scripts.faults.broken_reward import FUNCTION, VARIABLE
from scripts.faults.find import RunProcesses, environment

DEEDS = {"S1": "zero", "S2": "share", "T3": "huge", "X-reward": "stall"}
"""What each kind asks for; S3 says itself which it is."""
HOW_TO = f"start the run with {VARIABLE}=<an absolute file name> in its environment and reward.fn={FUNCTION}"


def find_switch(paths: RunPaths, found: RunProcesses) -> Path:
    """The file that this run's reward function looks at. Raises UsageError where it looks at none."""
    try:
        fn = yaml.safe_load(paths.config.read_text())["reward"]["fn"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UsageError(f"{paths.config} can't be read: {error}", "it is written when the run starts") from error
    if fn != FUNCTION:
        raise UsageError(f"this run's reward.fn is {fn}, which has no switch", HOW_TO)
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
