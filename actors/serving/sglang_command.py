"""Builds the command line and environment of one SGLang server from the configuration, and finds a free port.

Ray sets OMP_NUM_THREADS to an actor's CPUs, 1 for none, so the number of threads is set explicitly here.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from actors.serving.group_address import LOOPBACK, interface_with
from launcher.base.addresses import bound, free_port, is_every_interface
from launcher.base.errors import ResourceError
from launcher.config.schema import SGLangConfig
from launcher.run_files.run_paths import login_name

CPU_ENTRY = (sys.executable, "-m", "actors.serving.sglang_cpu")
GPU_ENTRY = (sys.executable, "-m", "actors.serving.sglang_gpu")
NO_PROXY = ("no_proxy", "NO_PROXY")
"""Programs read the one or the other."""
KEEPS_CONNECTIONS_S = 60
"""By itself SGLang closes one that was idle for 5 s. A client whose loop stalls for the second between its own limit
(KEEP_ALIVE_S) and that would send into a connection that is being closed, which looks like a server's death."""


def command(
    config: SGLangConfig,
    *,
    entry: tuple[str, ...],
    device: str,
    index: int,
    generation: int,
    model_path: str,
    weight_version: int,
    port: int,
) -> list[str]:
    """`entry` and SGLang's arguments; those in `sglang.extra_args` come last, so they win."""
    options: dict[str, object] = {
        "model-path": model_path,
        "weight-version": weight_version,
        "host": config.host,
        "port": port,
        "load-format": "safetensors",  # `auto` also takes *.bin, which is unpickled
        "dtype": config.dtype,
        "tp-size": config.tp_size,
        "dp-size": config.dp_size,
        "random-seed": sampling_seed(config, index, generation),
        "context-length": config.context_length,
        "max-running-requests": config.max_running_requests,
        "max-total-tokens": config.max_total_tokens,
        "attention-backend": config.attention_backend,
        "mem-fraction-static": config.mem_fraction_static if device == "cuda" else None,
        "cuda-graph-max-bs-decode": config.cuda_graph_max_bs_decode if device == "cuda" else None,
        "log-level": config.log_level,
        "log-level-http": "warning",  # a line for each request costs more than it is worth
        "enable-metrics": True,
        "incremental-streaming-output": True,  # else each event has all the tokens so far
        "skip-server-warmup": True,  # it begins with a sleep; the generation that makes a server READY replaces it
    }
    options |= {key.replace("_", "-"): value for key, value in config.extra_args.items()}
    return [*entry, *(word for key, value in options.items() for word in words_of(key, value))]


def memory_limit(config: SGLangConfig, *, device: str) -> int | None:
    """In bytes for each of its processes. None on a GPU: CUDA reserves address space as large as its memory."""
    if config.memory_limit_gib is None or device != "cpu":
        return None
    return int(config.memory_limit_gib * 2**30)


def words_of(key: str, value: object) -> Iterator[str]:
    """`--key value`; a flag for True, nothing for False and None, several values for a list."""
    if value is None or value is False:
        return
    yield f"--{key}"
    if value is not True:
        yield from map(str, value if isinstance(value, list | tuple) else [value])


def environment(
    config: SGLangConfig,
    inherited: Mapping[str, str],
    *,
    device: str,
    gpu_ids: tuple[str, ...],
    scratch: Path,
    model_path: str,
    meets_at: str = LOOPBACK,
) -> dict[str, str]:
    """`inherited` and what this server needs. `meets_at`: its node's side of a group with the trainer.

    `scratch` takes its temporary files, which SGLang leaves behind; compiled kernels stay where they always were.
    """
    environment = {**inherited, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{login_name()}")
    environment.setdefault("SGLANG_TIMEOUT_KEEP_ALIVE", str(KEEPS_CONNECTIONS_S))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each start compiles thousands of modules again
    for name in NO_PROXY:  # SGLang asks itself at its start, and would ask the proxy of http_proxy instead
        environment[name] = ",".join(filter(None, (inherited.get(name), LOOPBACK, "localhost", config.host)))
    if device == "cpu":
        environment["OMP_NUM_THREADS"] = str(config.threads or max(1, int(config.num_cpus)))
    if (interface := interface_with(meets_at)) is not None and (device == "cpu" or meets_at != LOOPBACK):
        # left alone, gloo listens where this machine's name leads, and NCCL where other nodes may not come
        environment.setdefault("GLOO_SOCKET_IFNAME" if device == "cpu" else "NCCL_SOCKET_IFNAME", interface)
    if device != "cpu":
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # by itself CUDA's 0 is the fastest, NVML's the first
    if device != "cpu" and gpu_ids:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(sorted(gpu_ids, key=_number))  # Ray's order is any
    if Path(model_path).is_dir():
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # no wait for the hub
    return environment


def _number(gpu_id: str) -> tuple[int, str]:
    """Numbers in their order; names (`GPU-…`, `MIG-…`) after them."""
    return (int(gpu_id), "") if gpu_id.isdigit() else (sys.maxsize, gpu_id)


def choose_port(config: SGLangConfig, index: int) -> int:
    """`sglang.port` + index, or a free one. Raises ResourceError where it is in use or the host isn't ours."""
    wanted = 0 if config.port is None else config.port + index
    try:
        trial = bound(
            config.host, wanted or free_port(config.host)
        )  # as the server does: only a listener is in the way
    except OSError as error:
        raise ResourceError(
            f"server {index} can't listen on {config.host}:{wanted or 'any port'}: {os.strerror(error.errno or 0)}",
            "set sglang.port to a free port (null: one is found), or end what listens there (`ss -ltnp`); "
            "sglang.host must be an address of this machine",
        ) from error
    with trial:
        address, port = trial.getsockname()[:2]
    if is_every_interface(address):  # a name may mean that too
        raise ResourceError(
            f"sglang.host={config.host} is every interface of this machine: anybody could ask server {index}",
            "set sglang.host to 127.0.0.1, or to this machine's address in the cluster's own network",
        )
    return int(port)


def url(config: SGLangConfig, port: int) -> str:
    """Where clients reach the server."""
    return f"http://[{config.host}]:{port}" if ":" in config.host else f"http://{config.host}:{port}"


SEED_STRIDE = 1009
"""So that a restarted server does not draw the same samples again; larger than any number of servers."""


def sampling_seed(config: SGLangConfig, index: int, generation: int) -> int:
    """SGLang's `--random-seed` for server `index` after `generation` restarts. By default it starts from `seed`."""
    return config.random_seed + index + SEED_STRIDE * generation
