"""Whatever is hidden, sampled, cut or reordered: no advice is newer than the last step that was seen good."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoints.health_evidence import SeenSteps, judge
from launcher.checkpoints.onset import find_falls, standing
from launcher.config.supervision import RestoreConfig
from launcher.diagnosis.judging.step_history import evidence_of, falls_of, passes_of
from launcher.diagnosis.reading.inputs import find_inputs, read_inputs
from tests.support.made_runs.hidden_steps import WAYS, advised
from tests.support.made_runs.rewards import FALLS

ONSET, STEPS = 120, 260


def rewards():
    noise = np.random.default_rng(0).normal(0, 0.03, STEPS)
    return np.where(np.arange(STEPS) < ONSET, 0.7 + noise, 0.0)


def health_of(steps):
    seen = np.array(sorted(set(steps)), dtype=np.int64)
    series = rewards()[seen]
    return judge(SeenSteps(steps=seen, rewards=series), standing(find_falls(series)), RestoreConfig(), source="")


def last_seen_good(steps):
    return max((step for step in steps if step < ONSET), default=-1)


shown = st.one_of(
    st.sets(st.integers(0, STEPS - 1)),
    st.builds(lambda every, first: set(range(first, STEPS, every)), st.integers(1, 40), st.integers(0, 200)),
    st.builds(lambda a, b: {step for step in range(STEPS) if not a <= step < b}, *[st.integers(0, STEPS)] * 2),
    st.builds(lambda a, b: set(range(min(a, b), max(a, b))), *[st.integers(0, STEPS)] * 2),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shown)
def test_no_advice_is_newer_than_the_last_step_seen_good(steps):
    health = health_of(steps)
    for until in (health.good_until, health.unsure_until):
        assert until is None or until < last_seen_good(steps)
    for step in range(STEPS):
        if step not in steps:
            assert health.of(step)[0] == "not seen"


@settings(max_examples=10, deadline=None, derandomize=True)
@given(shown, st.randoms(use_true_random=False))
def test_a_table_in_any_order_says_the_same(tmp_path_factory, steps, random):
    series, order = rewards(), sorted(steps)
    random.shuffle(order)
    file = tmp_path_factory.mktemp("table") / "export.csv"
    file.write_text("Step,run - task_reward/avg\n" + "".join(f"{step},{float(series[step])}\n" for step in order))
    if not order:
        return
    contents = read_inputs(find_inputs([file]))
    passes = passes_of(contents.steps)
    assert len(passes) == 1
    assert evidence_of(contents, falls_of(contents.steps, passes), passes).good_until == health_of(steps).good_until


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_hidden_steps_of_made_runs(number):
    """Of 2,000 of these none was too new (measurements)."""
    good_until, onset = advised(number, seed=7)
    assert good_until is None or good_until < onset


def test_advice_is_from_before_the_early_end_of_the_onset_s_interval():
    """An interval "182 to 189" was printed beside the advice 188."""
    wide = 0
    for number, kind in enumerate([*FALLS] * 3):
        rewards = np.array(FALLS[kind](random.Random(number)).rewards)
        seen = SeenSteps(steps=np.arange(len(rewards)), rewards=rewards, total=len(rewards))
        fall = standing(find_falls(rewards))
        if fall is None:
            continue
        until = judge(seen, fall, RestoreConfig(), source="").good_until
        assert until is None or until < fall.earliest
        wide += until is not None and fall.earliest < fall.onset
    assert wide > 3
