"""Which GPU each server and the trainer get. Pure; the shares are Ray's bookkeeping, not a limit on memory."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config import RunConfig

ROUNDING = 1e-9  # three shares of a third fill one GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """`gpus` are numbers counted from 0 over all machines; empty on the CPU. `share` is of each of them."""

    name: str
    gpus: tuple[int, ...]
    share: float


def place(config: RunConfig, *, servers_on: str, trainer_on: str) -> tuple[Booking, ...]:
    """Servers over several GPUs get whole ones; then each share the first GPU with room for it, the largest first.

    `servers_on` and `trainer_on` are `cuda` or `cpu`.
    """
    sglang = config.sglang
    used: list[float] = []
    booked = {f"server-{index}": (sglang.tp_size, sglang.gpu_fraction, servers_on) for index in range(sglang.n_servers)}
    booked["trainer"] = (1, config.actor.gpu_fraction, trainer_on)
    largest_first = sorted(booked, key=lambda name: (booked[name][0], booked[name][1]), reverse=True)
    gpus = {name: _take(used, *booked[name]) for name in largest_first}
    return tuple(Booking(name=name, gpus=gpus[name], share=share) for name, (_, share, _) in booked.items())


def _take(used: list[float], count: int, share: float, device: str) -> tuple[int, ...]:
    if device == "cpu":
        return ()
    if count > 1:
        used += [1.0] * count
        return tuple(range(len(used) - count, len(used)))
    for gpu, taken in enumerate(used):
        if taken + share <= 1 + ROUNDING:
            used[gpu] += share
            return (gpu,)
    used.append(share)
    return (len(used) - 1,)


def gpus_needed(config: RunConfig, *, servers_on: str = "cuda", trainer_on: str = "cuda") -> int:
    """GPUs that servers and trainer book together."""
    booked = place(config, servers_on=servers_on, trainer_on=trainer_on)
    return 1 + max((gpu for booking in booked for gpu in booking.gpus), default=-1)


def describe_booking(config: RunConfig) -> str:
    """Who books which share of a GPU, for a message."""
    sglang, actor = config.sglang, config.actor
    servers = f"{sglang.n_servers} server{'s' if sglang.n_servers > 1 else ''}"
    each = f"{sglang.tp_size} GPUs" if sglang.tp_size > 1 else f"sglang.gpu_fraction={sglang.gpu_fraction:g}"
    booked = [] if sglang.device == "cpu" else [f"{servers} × {each}"]
    booked += [] if actor.device == "cpu" else [f"the trainer × actor.gpu_fraction={actor.gpu_fraction:g}"]
    return " + ".join(booked)
