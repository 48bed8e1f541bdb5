"""Finds what a run lacks on this machine before anything is started, and reports all of it in one message.

Each check yields what is missing instead of raising at the first: whoever moves a run to a new machine wants the
full list. Looking creates nothing (an existence check that creates what it looks for is a known trap).
The records of a data set, and the checkpoint to resume from, are checked by the driver.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from launcher.base.errors import ConfigError, RewardImportError, UnsupportedSetting, UsageError
from launcher.base.findings import Finding
from launcher.checkpoints.uploads import remote_of
from launcher.config.foreign import OWN
from launcher.config.lora import INSTALL_PEFT
from launcher.config.optimizer import ADAMW
from launcher.config.schema import RunConfig
from launcher.resources.gpu_checks import NO_GPU
from launcher.resources.hardware import Hardware
from launcher.resources.missing_files import missing_data, missing_models
from launcher.resources.missing_machine import (
    missing_gpus,
    missing_login,
    missing_memory,
    missing_ports,
    missing_room,
    missing_webhook,
    missing_writer,
)
from launcher.resources.node_checks import missing_on_node
from launcher.resources.run_plan import RunPlan

IMPORT_WITHIN_S = 120.0

PROBE = """
import json, sys
from actors.reward.reward_import import ARGUMENTS, KEY, check_signature, function_names, import_named
from launcher.base.errors import RewardImportError
answer, is_there = None, False
try:
    for name in function_names(sys.argv[1]):
        is_there = False
        function = import_named(name, KEY)
        is_there = True
        check_signature(name, function, KEY, ARGUMENTS)
except RewardImportError as error:
    # Without a cause: the module has no such function, or the setting names none.
    is_there |= error.__cause__ is None or isinstance(error.__cause__, SyntaxError)
    answer = [error.message, error.hint, *["nowhere"] * is_there]
print(json.dumps(answer))
"""
PROBE_OPTIMIZER = """
import json, sys
from torch import nn
from actors.model.optimizer import build_optimizer
from launcher.base.errors import ConfigError
from launcher.config.optimizer import OptimizerConfig
answer = None
try:
    build_optimizer(nn.Linear(1, 1), OptimizerConfig(**json.loads(sys.argv[1])))
except ConfigError as error:
    answer = [error.message, error.hint]
print(json.dumps(answer))
"""
PROBE_SERVER = """
import argparse, json, sys
from actors.serving import sglang_cpu
from actors.serving.sglang_command import words_of
sglang_cpu.prepare()  # else SGLang isn't imported without a GPU; its arguments are the same
answer = None
class RaisingParser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)
try:
    from sglang.srt.server_args import ServerArgs
except ImportError:
    ServerArgs = None
if ServerArgs is not None:
    parser = RaisingParser()
    ServerArgs.add_cli_args(parser)
    for name, value in json.loads(sys.argv[1]).items():
        try:
            parser.parse_args(["--model-path", "-", *words_of(name.replace("_", "-"), value)])
        except ValueError as error:
            answer = [f"sglang.extra_args.{name}={value}: SGLang says: {error}", sys.argv[2]]
            break
print(json.dumps(answer))
"""
ARGUMENTS_OF_SGLANG = "`python -m sglang.launch_server --help` lists its arguments"


def preflight(config: RunConfig, hardware: Hardware, plan: RunPlan, checks: Sequence[Finding] = ()) -> None:
    """Raises the one UsageError there is, or a UsageError that lists all."""
    refuse(find_missing(config, hardware, plan, checks))


def refuse(missing: Sequence[UsageError]) -> None:
    """Raises the one UsageError there is, or a UsageError that lists all; nothing where nothing is missing."""
    if len(missing) == 1:
        raise missing[0]
    if missing:
        items = [str(error).replace("\n", "\n   ") for error in missing]
        listed = "\n".join(f"{number}. {item}" for number, item in enumerate(items, 1))
        raise UsageError(
            f"{len(missing)} things are missing before this run can start:\n{listed}",
            "nothing was started; the same command with dry_run=true shows the plan",
        )


def find_missing(
    config: RunConfig, hardware: Hardware, plan: RunPlan, checks: Sequence[Finding] = ()
) -> list[UsageError]:
    """Everything that keeps this run from starting here, each with what to change. `plan` is of this hardware.

    `checks`: of this machine (`check_node`), which a cluster's nodes are asked for when it is joined.
    """
    here = config.cluster.address == "local"  # else servers and trainer run on machines that can't be seen from here
    known = here or plan.is_described
    return [
        *(missing_gpus(config, hardware, plan, _of_none(checks)) if known else ()),
        *(missing_memory(plan) if known else ()),
        *(missing_on_node(config, plan.devices if hardware.gpus else (), checks) if here else ()),
        *missing_models(config, plan.shape),
        *missing_data(config),
        *_missing_imports(config),
        *missing_room(config, plan),
        *(missing_ports(config) if here else ()),
        *missing_login(config),
        *missing_writer(config),
        *missing_webhook(config),
        *_missing_protocol(config),
        *(_missing_peft(config) if here else ()),
        *(_refused_arguments(config) if here else ()),
    ]


def _of_none(checks: Sequence[Finding]) -> str:
    """The remedy where this machine has no GPU that can be used."""
    return next((check.hint for check in checks if check.subject == NO_GPU), "")


def _missing_imports(config: RunConfig) -> Iterator[UsageError]:
    """The reward function: importable, and with the keyword arguments it will be given. It is not called. And an
    optimizer by import path: it is made, for a matrix of one number."""
    yield from _tried(PROBE, config.reward.fn, key=f"reward.fn={config.reward.fn}", kind=RewardImportError)
    optimizer = config.actor.optimizer
    if optimizer.type != ADAMW and config.trainer.adapter == OWN:
        key = f"actor.optimizer.type={optimizer.type}"
        yield from _tried(PROBE_OPTIMIZER, json.dumps(asdict(optimizer)), key=key, kind=ConfigError)


def _refused_arguments(config: RunConfig) -> Iterator[UsageError]:
    """Of sglang.extra_args the first that the SGLang which is installed here, if any, doesn't know or take. One that
    takes too long to import, or can't be, has refused none."""
    if extra := config.sglang.extra_args:
        with contextlib.suppress(_NoAnswer):
            if answer := _ask(PROBE_SERVER, json.dumps(extra), ARGUMENTS_OF_SGLANG):
                yield UnsupportedSetting(*answer)


def _tried(probe: str, *arguments: str, key: str, kind: type[UsageError]) -> Iterator[UsageError]:
    try:
        answer = _ask(probe, *arguments)
    except _NoAnswer as error:
        reason, hint = error.args
        yield kind(f"{key}: {reason}", hint)
        return
    if answer is not None:
        message, hint, *nowhere = answer
        yield (UnsupportedSetting if nowhere else kind)(message, hint)


class _NoAnswer(Exception):
    """A probe's; with the reason, and what to do."""


def _ask(probe: str, *arguments: str) -> list[str] | None:
    """What the probe refuses, what to do, and a third word where no machine would take it; None: nothing. Another
    process imports it: a user's module may import torch, take long, or end the process that imports it. Raises
    _NoAnswer."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", probe, *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=IMPORT_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        reason = f"its import did not end within {IMPORT_WITHIN_S:g} s"
        raise _NoAnswer(reason, "move what takes long into the function") from error
    try:
        answer: list[str] | None = json.loads(done.stdout.splitlines()[-1])  # after whatever the module printed
    except (IndexError, ValueError) as error:
        reason = f"its import ended the process with exit code {done.returncode}"
        raise _NoAnswer(reason, f"its output: {done.stderr.strip()[-200:]}") from error
    return answer


def _missing_peft(config: RunConfig) -> Iterator[UsageError]:
    if config.actor.use_lora and importlib.util.find_spec("peft") is None:
        yield ConfigError("actor.use_lora=true needs PEFT, which is not installed", INSTALL_PEFT)


def _missing_protocol(config: RunConfig) -> Iterator[UsageError]:
    """The package that recover.url needs; whether it may be written to is checked when the run begins."""
    try:
        remote_of(config)
    except UsageError as error:
        yield error
