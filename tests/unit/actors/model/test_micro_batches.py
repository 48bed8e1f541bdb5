"""Packing as a property, the layout by hand, and each rollout that can't be trained on with its message."""

import dataclasses
import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.model.micro_batches import (
    PADDING,
    SampledSequence,
    lay_out,
    pack,
    sequences_of,
    tokens_in_rows,
)
from actors.model.objective import Objective
from launcher.base.errors import ConfigError, TrainerError
from launcher.config.schema import ActorConfig
from tests.support.tiny_models import make_groups
from tests.support.worlds.model import share_out


@pytest.mark.slow
@given(st.lists(st.integers(1, 40)), st.integers(40, 200))
def test_every_sequence_is_packed_once_and_no_micro_batch_is_too_large(lengths, max_tokens):
    packed = pack(lengths, max_tokens=max_tokens)
    assert sorted(index for rows in packed for index in rows) == list(range(len(lengths)))
    assert all(len(rows) * max(lengths[index] for index in rows) <= max_tokens for rows in packed)


@given(st.lists(st.integers(1, 40), min_size=1), st.integers(40, 200))
def test_a_micro_batch_is_closed_only_when_the_next_sequence_does_not_fit(lengths, max_tokens):
    packed = pack(lengths, max_tokens=max_tokens)
    for rows, following in itertools.pairwise(packed):
        assert (len(rows) + 1) * lengths[rows[0]] > max_tokens
        assert lengths[rows[-1]] >= lengths[following[0]]


def test_like_lengths_lie_together_in_the_order_they_came():
    assert pack([3, 9, 3, 9, 1], max_tokens=18) == [[1, 3], [0, 2, 4]]


def test_a_sequence_longer_than_a_micro_batch_names_the_setting():
    with pytest.raises(ConfigError, match=r"(?s)17 tokens does not fit .* 16.*actor\.mb_spec\.max_tokens_per_mb"):
        pack([3, 17], max_tokens=16)


def test_layout_by_hand():
    sequences = [
        SampledSequence(prompt=(5,), completion=(6, 7), logprobs=(-0.1, -0.2)),
        SampledSequence(prompt=(1, 2, 3), completion=(4,), logprobs=(-0.3,)),
    ]
    ((batch,),) = share_out(sequences, [True, True], 100, ranks=1)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, PADDING]]
    assert batch.positions.tolist() == [2, 4, 5]  # the token before each completion token, rows of 4
    assert batch.targets.tolist() == [4, 6, 7]
    assert batch.sequences.tolist() == [1, 0, 0]
    assert batch.server_logprobs.tolist() == pytest.approx([-0.3, -0.1, -0.2])


def test_sequences_that_teach_nothing_are_kept_apart():
    sequences = [SampledSequence(prompt=(1,), completion=(2,), logprobs=(-0.1,)) for _ in range(3)]
    (batches,) = share_out(sequences, [False, True, False], 100, ranks=1)
    assert [(batch.learns, batch.sequences.tolist()) for batch in batches] == [(True, [1]), (False, [0, 2])]


def test_tokens_in_rows_are_those_of_the_tensors():
    source = random.Random(3)
    sequences = [
        SampledSequence(prompt=(1,) * source.randint(1, 9), completion=(2,), logprobs=(-0.1,)) for _ in range(23)
    ]
    lengths, learning = [len(one) for one in sequences], [source.random() < 0.3 for _ in sequences]
    for ranks in (1, 2, 8):
        laid = lay_out(lengths, learning, 24, ranks=ranks)
        shares = share_out(sequences, learning, 24, ranks=ranks)
        made = sum(batch.input_ids.numel() for share in shares for batch in share)
        assert sum(lengths) < tokens_in_rows(laid, lengths) == made, ranks
    assert any(not rows for share in laid for rows, _ in share), "of 8 ranks some have empty ones"


def test_what_rows_take_is_known():
    objective = Objective(ActorConfig(), temperature=1.0, dtype=torch.float32, reference=None)
    groups = make_groups()
    ((batch,),) = objective.prepare(groups)
    made = sum(one.input_ids.numel() for one in batch.micro_batches)
    assert made == batch.n_in_rows
    assert batch.n_given == sum(map(len, sequences_of(groups))) < batch.n_in_rows


def with_first_completion(group, **changes):
    first, *others = group.rollouts
    completion = dataclasses.replace(first.completion, **changes)
    return dataclasses.replace(group, rollouts=(dataclasses.replace(first, completion=completion), *others))


def test_a_completion_without_all_its_logprobs_names_prompt_and_server():
    group = with_first_completion(make_groups()[0], token_ids=(1, 2, 3), logprobs=(-0.5, -0.5))
    with pytest.raises(TrainerError, match="0 of prompt p0 from server server-0 has 3 tokens and 2 log-probs"):
        sequences_of([group])


def test_a_prompt_without_tokens_is_refused_by_its_id():
    group = make_groups()[0]
    empty = dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, token_ids=()))
    with pytest.raises(TrainerError, match=r"prompt p0 .* without tokens"):
        sequences_of([empty])
