"""Where memory ran out decides what gives way, rung by rung, and every ladder ends."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from launcher.config.schema import RunConfig
from launcher.config.supervision import MemoryConfig
from launcher.policy.exit_cause import RanOut
from launcher.policy.memory_backoff import (
    CHECKPOINTING,
    CONCURRENCY,
    MEM_FRACTION,
    MICRO_BATCH,
    NEW_TOKENS,
    POOL_TOKENS,
    SAMPLES,
    Lengths,
    MemorySettings,
    TriedSettings,
    next_rung,
    with_overrides,
)
from tests.support.worlds.policy import CONFIG, GPU

ALLOWED = MemoryConfig(change_learning=True)
CPU = dataclasses.replace(GPU, on_gpu=False, shares_gpu=False, max_total_tokens=20000)


def descend(ran_out, in_force, config=CONFIG, limit=60):
    """The rungs taken when memory runs out there again and again, as (key, value)."""
    rungs, tried = [], []
    for _ in range(limit):
        rung = next_rung(ran_out, in_force, tried, config)
        if not rung.overrides:
            return rungs
        tried.append(TriedSettings(ran_out=ran_out, settings=in_force))
        ((key, value),) = rung.overrides.items()
        rungs.append((key, value))
        in_force = in_force.changed(rung.overrides)
    raise AssertionError(f"no end after {limit} rungs")


@pytest.mark.parametrize(
    ("ran_out", "in_force", "rungs"),
    [
        (
            RanOut.SERVER_DEVICE,
            GPU,
            [*((MEM_FRACTION, f) for f in (0.7, 0.6, 0.5, 0.4)), *((CONCURRENCY, n) for n in (8, 4, 2))],
        ),
        (
            RanOut.SERVER_POOL,
            dataclasses.replace(GPU, mem_fraction_static=0.6),
            [*((CONCURRENCY, n) for n in (8, 4, 2)), (MEM_FRACTION, 0.7), (MEM_FRACTION, 0.8)],
        ),
        (
            RanOut.SERVER_POOL_TOO_SMALL,
            dataclasses.replace(GPU, mem_fraction_static=0.6),
            [(MEM_FRACTION, 0.7), (MEM_FRACTION, 0.8)],
        ),
        (RanOut.SERVER_POOL_TOO_SMALL, GPU, []),
        (
            RanOut.TRAINER_DEVICE,
            GPU,
            [
                (MICRO_BATCH, 2048),
                (MICRO_BATCH, 1500),
                (CHECKPOINTING, True),
                *((MEM_FRACTION, f) for f in (0.7, 0.6, 0.5, 0.4)),
            ],
        ),
        (
            RanOut.TRAINER_DEVICE,
            dataclasses.replace(GPU, shares_gpu=False),
            [(MICRO_BATCH, 2048), (MICRO_BATCH, 1500), (CHECKPOINTING, True)],
        ),
        (
            RanOut.SERVER_HOST,
            CPU,
            [*((POOL_TOKENS, n) for n in (10000, 5000, 2500, 1500)), *((CONCURRENCY, n) for n in (8, 4, 2))],
        ),
        (
            RanOut.TRAINER_HOST,
            CPU,
            [
                (MICRO_BATCH, 2048),
                (MICRO_BATCH, 1500),
                (CHECKPOINTING, True),
                *((POOL_TOKENS, n) for n in (10000, 5000, 2500, 1500)),
            ],
        ),
    ],
)
def test_each_ladder(ran_out, in_force, rungs):
    assert descend(ran_out, in_force) == rungs


def test_what_changes_learning_gives_way_only_where_that_is_allowed():
    usual = descend(RanOut.SERVER_DEVICE, GPU)
    further = descend(RanOut.SERVER_DEVICE, GPU, ALLOWED)
    assert further[: len(usual)] == usual
    assert further[len(usual) :] == [
        (NEW_TOKENS, 256),
        (NEW_TOKENS, 128),
        (NEW_TOKENS, 64),
        (SAMPLES, 4),
        (SAMPLES, 2),
    ]
    assert descend(RanOut.SERVER_POOL_TOO_SMALL, GPU, ALLOWED) == []


@hypothesis_settings(max_examples=60, deadline=None, derandomize=True)
@given(
    faults=st.lists(st.sampled_from(RanOut), min_size=80, max_size=80),
    in_force=st.sampled_from([GPU, CPU, dataclasses.replace(GPU, shares_gpu=False, mem_fraction_static=0.55)]),
    config=st.sampled_from([CONFIG, ALLOWED]),
)
def test_whatever_runs_out_in_whatever_order_the_ladder_ends(faults, in_force, config):
    """No settings come back: each rung leads to ones never tried before, so there are finitely many."""
    tried, seen = [], [in_force]
    for ran_out in faults:
        rung = next_rung(ran_out, in_force, tried, config)
        if not rung.overrides:
            continue
        tried.append(TriedSettings(ran_out=ran_out, settings=in_force))
        in_force = in_force.changed(rung.overrides)
        assert in_force not in seen
        seen.append(in_force)
    assert in_force.max_tokens_per_mb >= in_force.longest_sequence
    assert in_force.n_samples >= 2


@pytest.mark.parametrize(
    ("largest", "rungs"),
    [
        (0, [(MICRO_BATCH, 2048), (MICRO_BATCH, 1500), (CHECKPOINTING, True)]),  # it has not made one yet
        (3800, [(MICRO_BATCH, 1900), (MICRO_BATCH, 1500), (CHECKPOINTING, True)]),
        (9000, [(MICRO_BATCH, 2048), (MICRO_BATCH, 1500), (CHECKPOINTING, True)]),  # made before a rung was taken
        (1200, [(CHECKPOINTING, True)]),  # one sequence each already
    ],
)
def test_a_rung_is_a_smaller_micro_batch_than_there_was(largest, rungs):
    in_force = dataclasses.replace(CPU, largest_micro_batch=largest, max_total_tokens=None)
    assert descend(RanOut.TRAINER_HOST, in_force) == rungs


def test_what_was_seen_is_no_setting():
    seen = dataclasses.replace(CPU, largest_micro_batch=900)
    assert seen == CPU
    lengths = Lengths(longest_sequence=40).updated(0, 900)
    assert lengths.updated(50, 0) == Lengths(longest_sequence=50, largest_micro_batch=900)
    assert lengths.updated(0, 0) == Lengths(longest_sequence=40, largest_micro_batch=900), "an empty process knows none"


def test_the_settings_in_force_are_read_from_the_configuration():
    config = RunConfig()
    m = MemorySettings.of(config, longest_sequence=900, on_gpu=True, shares_gpu=False)
    assert m.mem_fraction_static == config.sglang.mem_fraction_static
    assert m.max_tokens_per_mb == config.actor.mb_spec.max_tokens_per_mb
    assert (m.max_new_tokens, m.n_samples) == (config.gconfig.max_new_tokens, config.gconfig.n_samples)


# ── a rise, said before it kills ──

MIB = 2**20


def tried(ran_out, **settings):
    return TriedSettings(ran_out=ran_out, settings=dataclasses.replace(GPU, **settings))


def beside(ran_out, **settings):
    """Tried with more requests too: these are no settings that come back."""
    return tried(ran_out, max_concurrent_rollouts=32, **settings)


TOO_LARGE = [beside(RanOut.SERVER_DEVICE, mem_fraction_static=f) for f in (0.7, 0.8)]
TOO_MANY = [beside(RanOut.SERVER_HOST, max_total_tokens=n) for n in (8000, 20000)]
TOO_SMALL = [beside(RanOut.SERVER_POOL_TOO_SMALL, mem_fraction_static=f) for f in (0.4, 0.7)]


@pytest.mark.parametrize(
    ("ran_out", "in_force", "known", "overrides"),
    [
        (RanOut.SERVER_DEVICE, {}, [tried(RanOut.SERVER_POOL_TOO_SMALL, mem_fraction_static=0.6)], {MEM_FRACTION: 0.7}),
        (RanOut.SERVER_DEVICE, {}, [tried(RanOut.SERVER_POOL_TOO_SMALL, mem_fraction_static=0.7)], {CONCURRENCY: 8}),
        (
            RanOut.SERVER_DEVICE,
            {},
            [tried(RanOut.SERVER_POOL_TOO_SMALL, mem_fraction_static=f) for f in (0.4, 0.7)],
            {CONCURRENCY: 8},
        ),
        (
            RanOut.SERVER_DEVICE,
            {"max_concurrent_rollouts": 2},
            [tried(RanOut.SERVER_POOL, max_concurrent_rollouts=2, mem_fraction_static=0.7)],  # though little was asked
            {},
        ),
        (RanOut.SERVER_DEVICE, {"on_gpu": False}, [], {CONCURRENCY: 8}),
        (RanOut.SERVER_POOL_TOO_SMALL, {"mem_fraction_static": 0.6}, [], {MEM_FRACTION: 0.7}),
        (RanOut.SERVER_POOL_TOO_SMALL, {"mem_fraction_static": 0.6, "on_gpu": False}, [], {}),
        (
            RanOut.SERVER_POOL_TOO_SMALL,
            {"mem_fraction_static": 0.6},
            [tried(RanOut.SERVER_DEVICE, mem_fraction_static=f) for f in (0.7, 0.8)],
            {},
        ),
        (RanOut.SERVER_DEVICE, {}, TOO_SMALL, {CONCURRENCY: 8}),
        (RanOut.SERVER_POOL_TOO_SMALL, {"mem_fraction_static": 0.6}, TOO_LARGE, {}),
        (RanOut.SERVER_POOL_TOO_SMALL, {"mem_fraction_static": 0.6}, TOO_LARGE[1:], {MEM_FRACTION: 0.7}),
        (RanOut.SERVER_POOL_TOO_SMALL, {"on_gpu": False, "max_total_tokens": 5000}, TOO_MANY, {}),
        (
            RanOut.SERVER_HOST,
            {"max_total_tokens": 20000},
            [beside(RanOut.SERVER_POOL, max_total_tokens=n) for n in (None, 5000, 10000)],
            {CONCURRENCY: 8},
        ),
        (RanOut.TRAINER_HOST, {"largest_micro_batch": 1500}, [], {CHECKPOINTING: True}),
        (RanOut.SERVER_HOST, {"max_total_tokens": 20001}, [], {POOL_TOKENS: 10000}),
        (RanOut.SERVER_HOST, {"max_total_tokens": 1500}, [], {CONCURRENCY: 8}),
        (
            RanOut.SERVER_HOST,
            {"max_total_tokens": 20000},
            [tried(RanOut.SERVER_POOL, max_total_tokens=n) for n in (None, 5000, 10000)],
            {CONCURRENCY: 8},
        ),
        (
            RanOut.SERVER_HOST,
            {"max_total_tokens": 20000},
            [tried(RanOut.SERVER_POOL, max_total_tokens=9999)],
            {POOL_TOKENS: 10000},
        ),
        (
            RanOut.SERVER_POOL_TOO_SMALL,
            {"on_gpu": False, "max_total_tokens": 5000},
            [tried(RanOut.SERVER_HOST, max_total_tokens=None), tried(RanOut.SERVER_HOST, max_total_tokens=10001)],
            {POOL_TOKENS: 10000},
        ),
        (
            RanOut.SERVER_POOL_TOO_SMALL,
            {"on_gpu": False, "max_total_tokens": 5000},
            [tried(RanOut.SERVER_HOST, max_total_tokens=10000)],
            {},
        ),
        (RanOut.SERVER_HOST, {"max_concurrent_rollouts": 7}, [], {CONCURRENCY: 3}),
        (RanOut.SERVER_HOST, {"max_concurrent_rollouts": 2}, [], {}),
        (RanOut.TRAINER_HOST, {"max_tokens_per_mb": 4097}, [], {MICRO_BATCH: 2048}),
        (RanOut.TRAINER_HOST, {"max_tokens_per_mb": 1500}, [], {CHECKPOINTING: True}),
        (RanOut.TRAINER_HOST, {"largest_micro_batch": 3001}, [], {MICRO_BATCH: 1500}),
    ],
)
def test_a_rung_is_strictly_between_what_was_too_small_and_what_is_in_force(ran_out, in_force, known, overrides):
    rung = next_rung(ran_out, dataclasses.replace(GPU, **in_force), known, CONFIG)
    assert dict(rung.overrides) == overrides
    assert overrides or rung.reason == f"{ran_out}: no setting is left that could give way"
    assert all(type(value) in (int, bool, float) for value in rung.overrides.values())
    assert [type(value) for key, value in rung.overrides.items() if key in (POOL_TOKENS, CONCURRENCY, MICRO_BATCH)] in (
        [],
        [int],
    )


def test_a_server_that_names_its_least_share_gets_more_and_nobody_else_does():
    low = dataclasses.replace(GPU, mem_fraction_static=0.4, max_concurrent_rollouts=2)
    assert next_rung(RanOut.SERVER_POOL_TOO_SMALL, low, [], CONFIG, 0.6).overrides == {MEM_FRACTION: 0.7}
    assert next_rung(RanOut.SERVER_POOL, low, [], CONFIG, 0.5).overrides == {MEM_FRACTION: 0.5}


def test_learning_gives_way_in_whole_tokens_and_samples_and_only_down():
    spent = dataclasses.replace(
        CPU, max_concurrent_rollouts=2, max_total_tokens=1500, max_new_tokens=129, n_samples=5, longest_sequence=1500
    )
    rungs = descend(RanOut.SERVER_HOST, spent, ALLOWED)
    assert rungs == [(NEW_TOKENS, 64), (SAMPLES, 2)]
    assert [type(value) for _, value in rungs] == [int, int]


def test_each_key_is_set_and_the_original_stays():
    config = RunConfig(experiment_name="x")
    changed = with_overrides(config, {"sglang.mem_fraction_static": 0.6, "actor.mb_spec.max_tokens_per_mb": 512})
    assert (changed.sglang.mem_fraction_static, changed.actor.mb_spec.max_tokens_per_mb) == (0.6, 512)
    assert (config.sglang.mem_fraction_static, config.actor.mb_spec.max_tokens_per_mb) == (0.8, 16384)


def test_a_key_that_is_none_is_refused():
    with pytest.raises(KeyError, match=r"sglang\.memory"):
        with_overrides(RunConfig(experiment_name="x"), {"sglang.memory": 1})
