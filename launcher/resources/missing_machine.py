"""Checks the machine for what a run needs: GPUs, memory, room on disks, ports, a WandB login."""

from __future__ import annotations

import contextlib
import importlib.util
import netrc
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

from launcher.base.errors import ConfigError, ResourceError, StorageError, UsageError
from launcher.checkpoints.in_memory_checkpoints import MEMORY_BACKED
from launcher.config.schema import RunConfig
from launcher.config.settings import value_of, with_values
from launcher.resources.config_checks import (
    LAST_PORT,
    SINGLE_ON_CPU,
    WAY,
    accepted_ways,
    beyond_last_port,
    other_ways,
    token_pool_on_cpu,
    usual_token_pool,
)
from launcher.resources.hardware import Hardware
from launcher.resources.memory_estimate import GIB, MIB
from launcher.resources.run_plan import RunPlan, lacks, smallest_gpu_gib
from launcher.run_files.run_keys import webhook_url
from launcher.run_files.run_paths import RunPaths

CHECKPOINTS_ROOM = 2
"""The newest one, and the one being written before an older one may go."""

LEAST_ROOM = 64 * MIB


def missing_gpus(config: RunConfig, hardware: Hardware, plan: RunPlan, remedy: str = "") -> Iterator[UsageError]:
    """GPUs that are asked for and not there, or too few of them; on the CPU the size of the token pool.

    `remedy`: of there being none (`gpu_checks.py`)."""
    devices = {"sglang.device": config.sglang.device, "actor.device": config.actor.device}
    elsewhere = "run it on a machine with a GPU; conf=arithmetic_cpu shows the complete system without one"
    asking = [f"{key}=cuda" for key, device in devices.items() if device == "cuda"]
    if asking and not hardware.gpus:
        yield ResourceError(
            f"a GPU{_of_size(config, hardware, plan)}: {' and '.join(asking)}, but {hardware.no_gpu}",
            f"{remedy}; or {elsewhere}" if remedy else elsewhere,
        )
    elif hardware.is_unusable and "auto" in devices.values():
        auto = " and ".join(f"{key}=auto" for key, device in devices.items() if device == "auto")
        settings = " ".join([*(f"{key}=cpu" for key in devices), *_further_on_cpu(config)])
        yield ResourceError(
            f"{auto} would take the CPU, but {hardware.no_gpu}", f"for a run on the CPU say so: {settings}"
        )
    elif plan.shortage is not None:
        yield plan.shortage
    if plan.devices[0] == "cpu" and config.sglang.device != "cpu":  # the latter was checked with the configuration
        for key, allowed in token_pool_on_cpu(config, "cpu"):
            yield ConfigError(f"{key}=null: {allowed}", "no GPU was found for sglang.device=auto")
    if "auto" in devices.values():  # what is named was checked with the configuration
        for key, allowed in other_ways(_with_devices(config, plan)):
            given = config.actor.weight_update_mode
            yield ConfigError(f"{key}={given}: {allowed}", f"set {key}=disk, or change what is named")


def _further_on_cpu(config: RunConfig) -> Iterator[str]:
    """What a server on the CPU needs beside the device."""
    for key in SINGLE_ON_CPU:
        if value_of(config, key) > 1:
            yield f"{key}=1"
    if config.sglang.max_total_tokens is None:
        yield f"sglang.max_total_tokens={usual_token_pool(config)}"


def _with_devices(config: RunConfig, plan: RunPlan) -> RunConfig:
    servers_on, trainer_on = plan.devices
    return with_values(config, {"sglang.device": servers_on, "actor.device": trainer_on})


def _of_size(config: RunConfig, hardware: Hardware, plan: RunPlan) -> str:
    gib = None if plan.shape is None else smallest_gpu_gib(config, hardware, plan.shape)
    return "" if gib is None else f" with {gib} GiB of memory"


def missing_memory(plan: RunPlan) -> Iterator[UsageError]:
    """GPU or host memory that the plan needs and the machine has not."""
    for problem in lacks(plan):
        yield ResourceError(f"memory: {problem}", problem.hint)


def missing_room(config: RunConfig, plan: RunPlan) -> Iterator[UsageError]:
    """A fileroot that can be written, with room for checkpoints; memory-backed storage for weights on their way."""
    fileroot = Path(config.cluster.fileroot)
    parent = nearest_existing(fileroot)
    refusal = why_not_writable(parent)
    if refusal:
        yield StorageError(
            f"cluster.fileroot={fileroot} can't be written: {parent}: {refusal}",
            "set cluster.fileroot to another folder",
        )
    else:
        yield from _too_little(
            parent,
            max(LEAST_ROOM, CHECKPOINTS_ROOM * plan.checkpoint_bytes),
            f"cluster.fileroot={fileroot}: {CHECKPOINTS_ROOM} checkpoints",
            "make room, or set cluster.fileroot to another disk",
        )
    others = {*accepted_ways(config)} & {*accepted_ways(_with_devices(config, plan))} - {"disk"}
    other = f", or set {WAY}={min(others)}" if others else ""  # "tensor", the faster one, comes first
    if plan.weight_files_bytes and os.access(MEMORY_BACKED, os.W_OK):
        yield from _too_little(
            MEMORY_BACKED,
            plan.weight_files_bytes,
            f"{MEMORY_BACKED}: weights on their way to the servers",
            f"enlarge it (docker: --shm-size){other}",
        )


def nearest_existing(path: Path) -> Path:
    """The path itself or its first ancestor that exists, as what is below it will be made there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def why_not_writable(folder: Path) -> str:
    """Why no file can be made in a folder; empty where one can.

    Permissions don't show read-only mounts or full disks, so a file is made; it never has a name (O_TMPFILE) where
    the file system knows how, and is gone in any case.
    """
    if not folder.is_dir():
        return "is a file"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _too_little(folder: Path, needed: int, what: str, hint: str) -> Iterator[UsageError]:
    free = shutil.disk_usage(folder).free
    if free < needed:
        yield ResourceError(f"{what} need {needed / GIB:.2f} GiB, {free / GIB:.2f} GiB are free", hint)


def missing_ports(config: RunConfig) -> Iterator[UsageError]:
    """An address that servers can listen on, and the ports asked for."""
    sglang = config.sglang
    ports = [0] if sglang.port is None else range(sglang.port, sglang.port + sglang.n_servers)
    if allowed := beyond_last_port(sglang.port, sglang.n_servers):
        yield ConfigError(f"sglang.port={sglang.port}: {allowed}", "change sglang.port")
    for port in (one for one in ports if one <= LAST_PORT):  # bind raises an OverflowError beyond it
        refusal = why_not_bound(sglang.host, port)
        if refusal and port:
            yield ResourceError(
                f"sglang.port={port} on {sglang.host}: {refusal}",
                "end what holds it, choose another one, or leave sglang.port=null for a free one",
            )
        elif refusal:
            yield ResourceError(f"sglang.host={sglang.host}: {refusal}", "an address of this machine, e.g. 127.0.0.1")
    metrics = config.cluster.metrics_port  # Ray waits half a minute for it, and then names another reason
    if metrics is not None and (refusal := why_not_bound("0.0.0.0", metrics)):
        yield ResourceError(f"cluster.metrics_port={metrics}: {refusal}", "end what holds it, or choose another one")


def why_not_bound(host: str, port: int) -> str:
    """Why nobody can listen there now; empty where one can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closed port is free
            listener.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def missing_webhook(config: RunConfig) -> Iterator[UsageError]:
    """The URL that `alerts.webhook` means, where that is a variable's name or what was recorded of it."""
    try:
        if config.alerts.webhook is not None:
            webhook_url(config.alerts.webhook, RunPaths.of(config).keys)
    except UsageError as error:
        yield error


def missing_writer(config: RunConfig) -> Iterator[UsageError]:
    """What writes TensorBoard's files, and what sends OpenTelemetry's spans: extras of this package."""
    path = config.stats_logger.tensorboard.path
    if path is not None and importlib.util.find_spec("tensorboardX") is None:
        yield ConfigError(
            f"stats_logger.tensorboard.path={path} needs tensorboardX, which is not installed",
            'pip install -c constraints.txt -e ".[tensorboard]"',
        )
    if path is not None and Path(path).is_file():
        yield ConfigError(f"stats_logger.tensorboard.path={path} is a file", "name a folder")
    exporter = config.stats_logger.otel.exporter
    if exporter != "none" and not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        yield ConfigError(
            f"stats_logger.otel.exporter={exporter} needs OpenTelemetry's exporter for HTTP, which is not installed",
            'pip install -c constraints.txt -e ".[otel]"',
        )


def _is_installed(module: str) -> bool:
    """`find_spec` raises where a package that it is in is missing too."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def missing_login(config: RunConfig) -> Iterator[UsageError]:
    """WandB's key: without one, its client would ask a terminal that isn't there."""
    if config.stats_logger.wandb.mode != "online" or os.environ.get("WANDB_API_KEY"):
        return
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc(os.environ.get("NETRC")).authenticators(host):
            return
    yield ResourceError(
        f"a WandB login: stats_logger.wandb.mode=online, but there is no key for {host}",
        "run `wandb login`, set WANDB_API_KEY, or take stats_logger.wandb.mode=offline",
    )
