"""What is found for a card fits it; what was typed stays; what can't fit is refused with `hardware=auto`, else kept."""

import copy
from dataclasses import replace

import pytest

from launcher.base.errors import ConfigError, ResourceError
from launcher.checkpoints.model_shape import KNOWN_SHAPES, known_shape
from launcher.config.settings import value_of
from launcher.resources.config_checks import check
from launcher.resources.fitting import FITTED, MICRO_BATCH, SPARE, fit
from launcher.resources.gpus import Gpu
from launcher.resources.hardware import Hardware
from launcher.resources.memory_estimate import GIB
from launcher.resources.run_plan import HELD_BY_OTHERS, lacks, make_plan
from tests.support.composed import composed

AUTO = composed("conf=gsm8k_h200", "hardware=auto")
NODE = composed("conf=gsm8k_node_80gb", "hardware=auto")
CARDS = [8, 11.5, 15.7, 23.5, 31, 39.5, 47, 63, 79, 93, 139, 179, 280]


def machine(gib, n_gpus=1):
    gpu = Gpu(name="GPU", memory=int(gib * GIB), free=int(gib * GIB))
    return Hardware(gpus=(gpu,) * n_gpus, cpus=64, memory=2048 * GIB, memory_free=2048 * GIB)


def found_on(config, gib, shape, n_gpus=1):
    """The fitted configuration; None where nothing fits."""
    try:
        return fit(config, machine(gib, n_gpus), shape)[0]
    except ResourceError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize(("config", "n_gpus"), [(AUTO, 1), (NODE, 8)])
@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_what_is_found_fits_with_a_tenth_left_and_a_larger_card_takes_it_too(name, config, n_gpus):
    shape = known_shape(name)
    longest = config.train_dataset.max_length + config.gconfig.max_new_tokens
    found = [(gib, found_on(config, gib, shape, n_gpus)) for gib in CARDS]
    assert found[0][1] is None or name.endswith("0.5B") or n_gpus > 1, "the smallest card has no room for that"
    assert found[-1][1] is not None
    fits = [one is not None for _, one in found]
    assert fits == sorted(fits), "a card with more memory takes what one with less takes"
    for gib, one in found:
        if one is None:
            continue
        check(one)
        plan = make_plan(one, machine(gib, n_gpus), shape)
        assert lacks(plan) == []
        assert all(place.headroom >= SPARE * place.capacity for place in plan.places if place.gpu is not None)
        assert one.actor.mb_spec.max_tokens_per_mb >= longest, "the longest sequence is in one micro-batch"
        at_once = one.rollout.max_concurrent_rollouts / one.sglang.n_servers * one.gconfig.n_samples
        waits = one.rollout.max_concurrent_rollouts > 1 and plan.kv_tokens < (at_once - one.gconfig.n_samples) * longest
        assert not waits, "no sequence waits for another's room in the KV cache"


def test_a_card_with_more_memory_computes_activations_once_and_generates_a_whole_step_at_once():
    shape = known_shape("Qwen/Qwen2.5-1.5B")
    small, large = found_on(AUTO, 79, shape), found_on(AUTO, 139, shape)
    assert small.actor.gradient_checkpointing
    assert not large.actor.gradient_checkpointing
    assert large.rollout.max_concurrent_rollouts == AUTO.train_dataset.batch_size
    assert large.rollout.max_concurrent_rollouts > small.rollout.max_concurrent_rollouts


@pytest.mark.parametrize("typed", FITTED)
def test_what_was_typed_stays(typed):
    shape = known_shape("Qwen/Qwen2.5-1.5B")
    config = copy.deepcopy(AUTO)
    config.sglang.mem_fraction_static = 0.31
    config.rollout.max_concurrent_rollouts = 17
    config.actor.mb_spec.max_tokens_per_mb = 3000
    config.actor.gradient_checkpointing = True
    found, note = fit(config, machine(139), shape, [typed, "seed"])
    values = {
        "sglang.mem_fraction_static": (found.sglang.mem_fraction_static, 0.31),
        "rollout.max_concurrent_rollouts": (found.rollout.max_concurrent_rollouts, 17),
        "actor.mb_spec.max_tokens_per_mb": (found.actor.mb_spec.max_tokens_per_mb, 3000),
        "actor.gradient_checkpointing": (found.actor.gradient_checkpointing, True),
    }
    assert {key for key, (now, before) in values.items() if now == before} == {typed}
    assert f"{typed} as typed" in note
    assert config.actor.mb_spec.max_tokens_per_mb == 3000, "what was given is not changed"


def test_without_it_and_without_a_gpu_nothing_is_changed():
    shape = known_shape("Qwen/Qwen2.5-1.5B")
    plain = composed("conf=gsm8k_h200")
    assert fit(plain, machine(139), shape) == (plain, "")
    on_cpu = composed("conf=arithmetic_cpu", "hardware=auto")
    no_gpu = Hardware(gpus=(), cpus=2, memory=24 * GIB, memory_free=20 * GIB, no_gpu="NVML finds no driver")
    found, note = fit(on_cpu, no_gpu, shape)
    assert found == on_cpu
    assert "nothing was changed" in note


def test_what_cannot_fit_is_refused_with_what_would():
    shape = known_shape("Qwen/Qwen2.5-1.5B")
    with pytest.raises(ResourceError, match=r"does not fit GPUs of 23\.5 GiB") as refused:
        fit(AUTO, machine(23.5), shape)
    assert refused.value.hint.startswith("take more or larger GPUs (actor.dp_size), ")
    config = copy.deepcopy(AUTO)
    config.actor.mb_spec.max_tokens_per_mb = 400_000
    with pytest.raises(ResourceError) as refused:
        fit(config, machine(79), shape, [MICRO_BATCH])
    assert f"leave {MICRO_BATCH} to hardware=auto" in refused.value.hint


def test_unknown_sizes_are_no_reason_to_guess():
    with pytest.raises(ConfigError, match="unknown until it is on this machine"):
        fit(AUTO, machine(139), None)


ONE = composed("conf=gsm8k_h200")


def test_a_preset_is_fitted_without_a_word_of_the_command_line():
    shape = known_shape("Qwen/Qwen2.5-1.5B")
    asked, found = fit(AUTO, machine(139), shape)[0], fit(ONE, machine(139), shape, marked=FITTED)
    assert {key: value_of(found[0], key) for key in FITTED} == {key: value_of(asked, key) for key in FITTED}
    assert found[1].startswith("fitted: sglang.mem_fraction_static=")
    one, note = fit(ONE, machine(139), shape, marked=[key for key in FITTED if key != MICRO_BATCH])
    assert one.actor.mb_spec.max_tokens_per_mb == ONE.actor.mb_spec.max_tokens_per_mb
    assert f"; {MICRO_BATCH} as typed; " in note


@pytest.mark.parametrize(
    ("gib", "name", "why"),
    [
        (139, "Qwen/Qwen9", "the sizes of Qwen/Qwen2.5-1.5B-Instruct are unknown until it is on this machine"),
        (23.5, "Qwen/Qwen2.5-1.5B", "no values leave a tenth of each GPU free"),
    ],
)
def test_a_preset_that_can_not_be_fitted_keeps_its_values_and_says_why(gib, name, why):
    """The pre-flight judges them, as it did before presets were fitted."""
    found, note = fit(ONE, machine(gib), known_shape(name), marked=FITTED)
    assert found == ONE
    assert note.startswith(f"not fitted, {why}; as the preset has it: sglang.mem_fraction_static, ")


def test_no_other_setting_is_fitted():
    with pytest.raises(ConfigError, match=r"^gconfig\.n_samples: \$\{fitted:…\} is for sglang\.mem_fraction_static, "):
        fit(ONE, machine(139), None, marked=["gconfig.n_samples", MICRO_BATCH])


def test_a_shortage_of_gpus_keeps_its_own_message():
    none = replace(machine(139), gpus=(), no_gpu="NVML finds no driver")
    found = fit(AUTO, none, known_shape("Qwen/Qwen2.5-1.5B"))
    assert found == (AUTO, "")
    assert fit(ONE, none, known_shape("Qwen/Qwen2.5-1.5B"), marked=FITTED) == (ONE, "")


def test_what_others_hold_of_a_card_at_a_start_changes_no_marked_setting():
    """A resume would train on other micro-batches, and what was learnt about memory would not be found again."""
    shape, card = known_shape("Qwen/Qwen2.5-1.5B"), machine(79)
    alone = fit(ONE, card, shape, marked=FITTED)
    shared = replace(card, gpus=(replace(card.gpus[0], free=card.gpus[0].memory - HELD_BY_OTHERS - 3 * GIB),))
    assert fit(ONE, shared, shape, marked=FITTED) == alone
    asked = [fit(AUTO, one, shape)[0] for one in (card, shared)]
    assert asked[0] != asked[1], "hardware=auto takes what is free now"


def test_a_marked_setting_leaves_what_counts_as_nobodys():
    shape, card = known_shape("Qwen/Qwen2.5-1.5B"), machine(79)
    found, _ = fit(ONE, card, shape, marked=FITTED)
    usual = replace(card, gpus=(replace(card.gpus[0], free=card.gpus[0].memory - HELD_BY_OTHERS),))
    (gpu,) = (place for place in make_plan(found, usual, shape).places if place.gpu is not None)
    assert gpu.headroom >= SPARE * gpu.capacity


def test_batches_that_are_made_ahead_are_in_flight_too():
    """Of a large card, which has room for more than one batch."""
    shape, ahead = known_shape("Qwen/Qwen2.5-0.5B"), copy.deepcopy(ONE)
    ahead.rollout.max_head_offpolicyness = 1
    found = [fit(one, machine(280), shape, marked=FITTED)[0] for one in (ONE, ahead)]
    size = ONE.train_dataset.batch_size
    assert [one.rollout.max_concurrent_rollouts for one in found] == [size, 2 * size]
