"""Finds the memory settings that fill the GPUs that are there (`hardware=auto`), by planning with one after the other.

Pure. What the figures rest on is `memory_estimate`, of which nothing was measured on a GPU: a tenth of each stays free.
"""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from launcher.base.errors import ConfigError, ResourceError
from launcher.base.wording import some_of
from launcher.checkpoints.model_shape import BYTES, KNOWN_SHAPES, ModelShape
from launcher.config.schema import RunConfig
from launcher.config.settings import as_typed, value_of
from launcher.resources.hardware import Hardware
from launcher.resources.memory_estimate import GIB
from launcher.resources.run_plan import RunPlan, gpu_memory, make_plan

FRACTION = "sglang.mem_fraction_static"
CONCURRENCY = "rollout.max_concurrent_rollouts"
MICRO_BATCH = "actor.mb_spec.max_tokens_per_mb"
CHECKPOINTING = "actor.gradient_checkpointing"
FITTED = (FRACTION, CONCURRENCY, MICRO_BATCH, CHECKPOINTING)

SPARE = 0.1
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Of a step's completions, how many at least are in the KV cache at once: tried in this order."""

MICRO_BATCHES = (16384, 8192, 4096, 2048, 1024)
WITHOUT_CHECKPOINTING = 4096
"""A smaller micro-batch than this keeps a GPU less busy than computing the activations twice costs."""

PERCENT = 100


class Fit(NamedTuple):
    """The configuration with what was found, and the sentence about it; "" where `hardware.auto` is not set."""

    config: RunConfig
    note: str


class _Training(NamedTuple):
    micro_batch: int
    checkpointing: bool


def fit(config: RunConfig, hardware: Hardware, shape: ModelShape | None, typed: Collection[str] = ()) -> Fit:
    """Settings of `FITTED` that were `typed` on the command line stay as they are.

    Raises ConfigError where the model's sizes are unknown, ResourceError where nothing fits.
    """
    if not config.hardware.auto:
        return Fit(config, "")
    fixed = [key for key in FITTED if key in typed]
    if shape is None:
        raise ConfigError(
            f"hardware=auto: the sizes of {config.actor.path} are unknown until it is on this machine",
            "download it first, or leave hardware=auto out and set what the preset sets",
        )
    plan = make_plan(config, hardware, shape)
    if "cuda" not in plan.devices or plan.shortage is not None:
        return Fit(config, "hardware=auto: no GPU is used, nothing was changed" if plan.shortage is None else "")
    longest = _longest(config, shape)
    found = _search(config, hardware, shape, longest, fixed)
    if found is None:
        raise _refusal(config, hardware, shape, longest, fixed)
    values = ", ".join(f"{key}={as_typed(value_of(found, key))}" for key in FITTED if key not in fixed)
    kept = f"; {some_of(fixed)} as typed" if fixed else ""
    return Fit(found, f"hardware=auto: {values}{kept}; a tenth of each GPU stays free")


def _search(
    config: RunConfig, hardware: Hardware, shape: ModelShape, longest: int, fixed: Sequence[str]
) -> RunConfig | None:
    """The first way of training, the fastest first, beside which the servers hold as many completions as can be.

    CUDA graphs take memory too: for all of a step's prompts or, where nothing fits beside these, for an eighth.
    """
    if CONCURRENCY in fixed:
        return _search_for(config.rollout.max_concurrent_rollouts, config, hardware, shape, longest, fixed)
    prompts = config.train_dataset.batch_size
    tries = (_search_for(n, config, hardware, shape, longest, fixed) for n in (prompts, max(1, prompts // 8)))
    return next((found for found in tries if found is not None), None)


def _search_for(
    at_once: int, config: RunConfig, hardware: Hardware, shape: ModelShape, longest: int, fixed: Sequence[str]
) -> RunConfig | None:
    """With graphs for so many prompts, of which as many are in flight as the servers hold."""
    prompts = at_once if CONCURRENCY in fixed else config.train_dataset.batch_size
    wanted = prompts * config.gconfig.n_samples
    tried = [
        (found, _held(found, hardware, shape, longest) / wanted)
        for training in _trainings(config, longest, fixed)
        if (found := _served(_trained(config, training, at_once), hardware, shape, wanted * longest, fixed)) is not None
    ]
    chosen = next((found for share in SHARES for found, held in tried if held >= share), None)
    if chosen is not None and CONCURRENCY not in fixed:
        fitting = int(_held(chosen, hardware, shape, longest) / config.gconfig.n_samples)
        chosen.rollout.max_concurrent_rollouts = max(1, min(at_once, fitting))
    return chosen


def _trainings(config: RunConfig, longest: int, fixed: Sequence[str]) -> Iterator[_Training]:
    actor = config.actor
    sizes = sorted({longest, *(size for size in MICRO_BATCHES if size >= longest)}, reverse=True)
    is_last_resort = CHECKPOINTING in fixed or MICRO_BATCH in fixed
    for checkpointing in (False, True) if CHECKPOINTING not in fixed else (actor.gradient_checkpointing,):
        for size in sizes if MICRO_BATCH not in fixed else (actor.mb_spec.max_tokens_per_mb,):
            if checkpointing or size >= min(WITHOUT_CHECKPOINTING, sizes[0]) or is_last_resort:
                yield _Training(size, checkpointing)


def _trained(config: RunConfig, training: _Training, at_once: int) -> RunConfig:
    changed = copy.deepcopy(config)
    changed.rollout.max_concurrent_rollouts = at_once
    changed.actor.mb_spec.max_tokens_per_mb = training.micro_batch
    changed.actor.gradient_checkpointing = training.checkpointing
    return changed


def _served(
    config: RunConfig, hardware: Hardware, shape: ModelShape, tokens: int, fixed: Sequence[str]
) -> RunConfig | None:
    """With the largest share of the GPU for the servers that fits and is of use to a step's `tokens`."""
    plan = make_plan(config, hardware, shape)
    if plan.devices[0] == "cpu" or FRACTION in fixed:
        return config if _has_room(plan) else None
    sglang = config.sglang
    weights = shape.parameters * BYTES[sglang.dtype] // sglang.tp_size
    cache = tokens * shape.kv_bytes_on_each(sglang.dtype, sglang.tp_size) // (sglang.n_servers * sglang.dp_size)
    of_use = math.ceil(PERCENT * (weights + cache) / gpu_memory(hardware)) + 1

    def is_too_much(percent: int) -> bool:
        sglang.mem_fraction_static = percent / PERCENT
        return not _leaves_spare(make_plan(config, hardware, shape))

    percents = range(1, min(of_use, PERCENT - 1) + 1)
    sglang.mem_fraction_static = bisect.bisect_left(percents, True, key=is_too_much) / PERCENT
    return config if _has_room(make_plan(config, hardware, shape)) else None


def _has_room(plan: RunPlan) -> bool:
    return bool(plan.kv_tokens) and _leaves_spare(plan)


def _leaves_spare(plan: RunPlan) -> bool:
    return all(place.headroom >= SPARE * place.capacity for place in plan.places if place.gpu is not None)


def _held(config: RunConfig, hardware: Hardware, shape: ModelShape, longest: int) -> float:
    """Completions of full length, with their prompts, that all servers hold at once."""
    tokens = make_plan(config, hardware, shape).kv_tokens or 0
    return tokens // longest * config.sglang.n_servers


def _longest(config: RunConfig, shape: ModelShape) -> int:
    """Tokens of the longest sequence, prompt and completion."""
    prompt = config.train_dataset.max_length
    limits = [config.sglang.context_length or shape.positions]
    if prompt is not None:
        limits.append(prompt + config.gconfig.max_new_tokens)
    return min(limits)


def _refusal(
    config: RunConfig, hardware: Hardware, shape: ModelShape, longest: int, fixed: Sequence[str]
) -> ResourceError:
    """With the nearest that does fit: more ranks, or a smaller model."""
    gib = gpu_memory(hardware) / GIB
    ways = [*_more_ranks(config, hardware, shape, longest, fixed), *_smaller_model(config, hardware, longest, fixed)]
    if fixed:
        ways.append(f"leave {some_of(fixed)} to hardware=auto")
    nearest = "; ".join(ways) or "take a GPU with more memory, or a smaller model (actor.path)"
    return ResourceError(
        f"hardware=auto: {config.actor.path} with sequences of {longest:,} tokens does not fit GPUs of {gib:.1f} GiB, "
        f"with a tenth of each left free, whatever {some_of([key for key in FITTED if key not in fixed])} are",
        nearest,
    )


def _more_ranks(
    config: RunConfig, hardware: Hardware, shape: ModelShape, longest: int, fixed: Sequence[str]
) -> Iterator[str]:
    for ranks in range(config.actor.dp_size + 1, len(hardware.gpus) * hardware.n_nodes + 1):
        changed = copy.deepcopy(config)
        changed.actor.dp_size = ranks
        if make_plan(changed, hardware, shape).shortage is None and _search(changed, hardware, shape, longest, fixed):
            yield f"actor.dp_size={ranks} fits here"
            return


def _smaller_model(config: RunConfig, hardware: Hardware, longest: int, fixed: Sequence[str]) -> Iterator[str]:
    for name, shape in sorted(KNOWN_SHAPES.items(), key=lambda one: -one[1].parameters):
        if _search(config, hardware, shape, min(longest, shape.positions), fixed):
            yield f"actor.path={name}-Instruct fits here"
            return
