"""Which ways of new weights to the servers a run can take (actor.weight_update_mode)."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.config.schema import RunConfig
from launcher.config.settings import with_values

KEY = "actor.weight_update_mode"
WAYS = ("disk", "tensor", "xccl")


def other_ways(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The key, and what would be allowed."""
    if why := _against_way(config):
        yield KEY, f"{' or '.join(accepted_ways(config))} with {why}"


def accepted_ways(config: RunConfig) -> tuple[str, ...]:
    """All that this run could take, whichever it has. Files are always among them."""
    runs = {way: with_values(config, {KEY: way}) for way in WAYS}
    return tuple(way for way, run in runs.items() if not _against_way(run))


def _against_way(config: RunConfig) -> str:
    """Why the run can't take the way that it has; "" if it can."""
    mode, nodes = config.actor.weight_update_mode, config.cluster.n_nodes
    if mode == "tensor" and nodes > 1:
        return f"cluster.n_nodes={nodes}: a handle of memory means nothing on another machine"
    if mode != "disk" and config.sglang.dp_size > 1:
        return f"sglang.dp_size={config.sglang.dp_size}: SGLang takes the others with dp_size 1 only"
    if mode == "tensor":
        return _against_handles(config)
    return _against_groups(config) if mode == "xccl" else ""


def _against_handles(config: RunConfig) -> str:
    """Why a CUDA handle's device number is another GPU in the server than in the trainer; "" if it isn't."""
    sglang, actor = config.sglang, config.actor
    if "cuda" not in (sglang.device, actor.device) or "cpu" in (sglang.device, actor.device):
        return ""
    if sglang.gpu_fraction + actor.gpu_fraction > 1:
        return (
            f"sglang.gpu_fraction={sglang.gpu_fraction:g} and actor.gpu_fraction={actor.gpu_fraction:g}: on GPUs of "
            "their own, where a handle names the wrong one"
        )
    return ""


def _against_groups(config: RunConfig) -> str:
    """Why no server can be in a group with the trainer; "" if it can."""
    sglang, actor = config.sglang, config.actor
    if sglang.device != actor.device:
        return f"sglang.device={sglang.device} and actor.device={actor.device}: a group is of one kind of device"
    if sglang.device != "cpu" and sglang.gpu_fraction + actor.gpu_fraction <= 1:
        return (
            f"sglang.gpu_fraction={sglang.gpu_fraction:g} and actor.gpu_fraction={actor.gpu_fraction:g}: on one "
            "GPU, where NCCL has no two ranks"
        )
    return ""
