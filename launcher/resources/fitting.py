"""Finds the memory settings that fill the GPUs that are there, by planning with one after the other: of a preset those
that it marks with `${fitted:…}`, with `hardware=auto` all.

Pure. What the figures rest on is `memory_estimate`, of which nothing was measured on a GPU: a tenth of each stays free.

Marked settings are fitted to the card as if nobody else used it. Fitted to what is free at that second, the same
command would have other values at each start: a resumed run would train on other micro-batches, and what the run has
learnt about memory, which is kept for its settings (`memory_history`), would not be found again. What is really free is
judged by the pre-flight, which refuses the run where it is too little. `hardware=auto` takes what is free now.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from launcher.base.errors import ConfigError, ResourceError
from launcher.base.wording import some_of
from launcher.checkpoints.model_shape import ModelShape
from launcher.config.schema import RunConfig
from launcher.config.settings import as_typed, value_of, with_values
from launcher.resources.hardware import Hardware
from launcher.resources.memory_estimate import GIB
from launcher.resources.run_plan import HELD_BY_OTHERS, gpu_memory, make_plan

FRACTION = "sglang.mem_fraction_static"
CONCURRENCY = "rollout.max_concurrent_rollouts"
MICRO_BATCH = "actor.mb_spec.max_tokens_per_mb"
CHECKPOINTING = "actor.gradient_checkpointing"
FITTED = (FRACTION, CONCURRENCY, MICRO_BATCH, CHECKPOINTING)

SPARE = 0.1
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Of the prompts to be in flight, how many at least are in the KV cache at once: tried in this order."""
MICRO_BATCHES = (16384, 8192, 4096, 2048, 1024)
WITHOUT_CHECKPOINTING = 4096
"""A smaller micro-batch than this keeps a GPU less busy than computing the activations twice costs."""


def settings_to_fit(config: RunConfig, typed: Collection[str], marked: Collection[str]) -> list[str]:
    """With `hardware.auto` all of `FITTED` that was not `typed` on the command line, else what is `marked`. Raises
    ConfigError where another setting is marked."""
    if strange := sorted(set(marked) - set(FITTED)):
        raise ConfigError(f"{some_of(strange)}: ${{fitted:…}} is for {some_of(FITTED)}", "give the value alone")
    return [key for key in FITTED if (key not in typed if config.hardware.auto else key in marked)]


def fit(
    config: RunConfig,
    hardware: Hardware,
    shape: ModelShape | None,
    typed: Collection[str] = (),
    marked: Collection[str] = (),
) -> tuple[RunConfig, str]:
    """The configuration with what was found, and the sentence about it; "" where nothing was to be fitted.

    Fitted are `settings_to_fit`: with `hardware.auto` to what is free, else to the card as if nobody else used it.
    Marked settings keep their values where the model's sizes are unknown, or nothing fits: the pre-flight judges these.

    Raises ConfigError where another setting is marked and, with `hardware.auto`, where the model's sizes are unknown;
    with it ResourceError where nothing fits.
    """
    is_asked, free = config.hardware.auto, settings_to_fit(config, typed, marked)
    if not (is_asked or free):
        return config, ""
    kept = f"as the preset has it: {some_of(free)}"
    if shape is None:
        unknown = f"the sizes of {config.actor.path} are unknown until it is on this machine"
        if not is_asked:
            return config, f"not fitted, {unknown}; {kept}"
        raise ConfigError(
            f"hardware=auto: {unknown}",
            "download it first, or leave hardware=auto out and set what the preset sets",
        )
    hardware = hardware if is_asked else _unshared(hardware)
    plan = make_plan(config, hardware, shape)
    if "cuda" not in plan.devices or plan.shortage is not None:
        is_told = is_asked and plan.shortage is None
        return config, "hardware=auto: no GPU is used, nothing was changed" if is_told else ""
    typed = [key for key in FITTED if key not in free]
    prompts = config.rollout.max_concurrent_rollouts if CONCURRENCY in typed else _most_in_flight(config)
    # CUDA graphs take memory too: for all prompts of a step or, where nothing fits beside these, for an eighth.
    fewer = prompts if CONCURRENCY in typed else max(1, prompts // 8)
    for at_once in dict.fromkeys((prompts, fewer)):
        if (found := _search(with_values(config, {CONCURRENCY: at_once}), hardware, shape, prompts, typed)) is not None:
            values = ", ".join(f"{key}={as_typed(value_of(found, key))}" for key in free)
            as_typed_too = f"; {some_of(typed)} as typed" if typed else ""
            name = "hardware=auto" if is_asked else "fitted"
            left = "a tenth of each GPU stays free"
            of_what = "" if is_asked else f", where others hold at most {HELD_BY_OTHERS // GIB} GiB of it"
            return found, f"{name}: {values}{as_typed_too}; {left}{of_what}"
    if not is_asked:
        return config, f"not fitted, no values leave a tenth of each GPU free; {kept}"
    raise ResourceError(
        f"hardware=auto: {config.actor.path} with sequences of {_longest(config, shape):,} tokens does not fit GPUs of "
        f"{gpu_memory(hardware) / GIB:.1f} GiB, with a tenth of each left free, whatever {some_of(free)} are",
        f"{f'leave {some_of(typed)} to hardware=auto, or ' if typed else ''}take more or larger GPUs (actor.dp_size), "
        "shorter sequences (train_dataset.max_length, gconfig.max_new_tokens) or a smaller model (actor.path)",
    )


def _unshared(hardware: Hardware) -> Hardware:
    """With GPUs of which nobody holds more than the driver keeps."""
    gpus = tuple(dataclasses.replace(gpu, free=max(0, gpu.memory - HELD_BY_OTHERS)) for gpu in hardware.gpus)
    return dataclasses.replace(hardware, gpus=gpus)


def _most_in_flight(config: RunConfig) -> int:
    """Prompts of the batch that a step waits for, and of those that are made ahead of it. With
    `actor.dynamic_sampling` others take the place of those that are left out: that makes no more at once."""
    return config.train_dataset.batch_size * (1 + config.rollout.max_head_offpolicyness)


def _search(
    config: RunConfig, hardware: Hardware, shape: ModelShape, prompts: int, typed: Collection[str]
) -> RunConfig | None:
    """The fastest way of training beside which the servers hold as many of the `prompts` as can be."""
    longest = _longest(config, shape)
    tried: list[tuple[RunConfig, int]] = []
    for way in _trainings(config, longest, typed):
        found = _with_share(with_values(config, way), hardware, shape, prompts * longest, typed)
        tokens, leaves_spare = _judged(found, hardware, shape)
        if tokens and leaves_spare:
            tried.append((found, tokens // longest // config.gconfig.n_samples))
    chosen = next((one for share in SHARES for one in tried if one[1] >= share * prompts), None)
    if chosen is None or CONCURRENCY in typed:
        return None if chosen is None else chosen[0]
    at_once = min(config.rollout.max_concurrent_rollouts, chosen[1])
    return with_values(chosen[0], {CONCURRENCY: max(1, at_once)})


def _trainings(config: RunConfig, longest: int, typed: Collection[str]) -> Iterator[Mapping[str, Any]]:
    """Micro-batches and checkpointing, the fastest first."""
    sizes = [*(size for size in MICRO_BATCHES if size > longest), longest]
    if MICRO_BATCH in typed:
        sizes = [config.actor.mb_spec.max_tokens_per_mb]
    for checkpointing in (config.actor.gradient_checkpointing,) if CHECKPOINTING in typed else (False, True):
        for size in sizes:
            if checkpointing or CHECKPOINTING in typed or size >= min(WITHOUT_CHECKPOINTING, sizes[0]):
                yield {MICRO_BATCH: size, CHECKPOINTING: checkpointing}


def _with_share(
    config: RunConfig, hardware: Hardware, shape: ModelShape, completions_tokens: int, typed: Collection[str]
) -> RunConfig:
    """With the largest share of a GPU for the servers that leaves a tenth free and is of use to a step."""
    if FRACTION in typed:
        return config
    shares = [with_values(config, {FRACTION: percent / 100}) for percent in range(1, 100)]
    wanted = completions_tokens * config.gconfig.n_samples

    def is_too_much(number: int) -> bool:
        is_idle = number > 0 and _judged(shares[number - 1], hardware, shape)[0] >= wanted
        return is_idle or not _judged(shares[number], hardware, shape)[1]

    return shares[max(0, bisect.bisect_left(range(len(shares)), True, key=is_too_much) - 1)]


def _judged(config: RunConfig, hardware: Hardware, shape: ModelShape) -> tuple[int, bool]:
    """Tokens that the KV caches of all servers hold, and whether a tenth of each GPU stays free."""
    plan = make_plan(config, hardware, shape)
    on_gpus = [place for place in plan.places if place.gpu is not None]
    leaves_spare = all(place.headroom >= SPARE * place.capacity for place in on_gpus)
    return (plan.kv_tokens or 0) * config.sglang.n_servers, leaves_spare


def _longest(config: RunConfig, shape: ModelShape) -> int:
    """Tokens of the longest sequence, prompt and completion."""
    prompt, context = config.train_dataset.max_length, config.sglang.context_length or shape.positions
    return context if prompt is None else min(context, prompt + config.gconfig.max_new_tokens)
