"""Packed is as padded, on every kind of attention that is here; a row whose sequences see each other is found out."""

import inspect
import itertools
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import varlen
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from actors.model import packed_attention
from actors.model.micro_batches import SampledSequence, fill, share_out
from actors.model.packed_attention import EACH, VARLEN
from launcher.base.errors import ConfigError
from launcher.config.schema import MicroBatchConfig
from tests.support.tiny_models import actor, make_groups, make_model, policy, train

LORA = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8.0}
WAYS = {
    "whole": {},
    "layers computed twice": {"gradient_checkpointing": True},
    "adapters": LORA,
    "adapters, layers computed twice": {**LORA, "gradient_checkpointing": True},
    "in small micro-batches": {"mb_spec": MicroBatchConfig(max_tokens_per_mb=24)},
    "bfloat16": {"dtype": "bfloat16"},
}
CASES = [("qwen2", way) for way in WAYS]
CASES += [(kind, way) for kind in ("llama", "gemma3_text") for way in ("layers computed twice", "adapters")]


def outcome(model):
    """Figures and gradients of a batch; after two steps in float32, which give every adapter a gradient."""
    train(model, seeds=(1, 2) if model._dtype is torch.float32 else ())
    stats = model.compute_gradients(make_groups())
    return stats, {name: parameter.grad.clone() for name, parameter in model._part.parameters.items()}


def equal(ours, theirs, *, is_exact=True):
    """But for roundings: after two steps of AdamW about 1e-6 of a gradient. In bfloat16 without any up to a tenth of
    its norm was seen, since a ratio that is rounded to the other side of a clip has no gradient."""
    (stats, gradients), (expected, wanted) = ours, theirs
    allowed = 1e-4 if is_exact else 0.2
    for name in ("loss", "grad_norm", "entropy", "approx_kl", "ratio_mean"):
        assert getattr(stats, name) == pytest.approx(getattr(expected, name), rel=allowed, abs=allowed / 10), name
    assert stats.logprob_distance.mean == pytest.approx(expected.logprob_distance.mean, rel=allowed)
    for names in [[name] for name in wanted] if is_exact else [list(wanted)]:
        ours, theirs = (torch.cat([of[name].flatten() for name in names]) for of in (gradients, wanted))
        assert (ours - theirs).norm() <= allowed * theirs.norm(), names


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_packed_is_as_padded(tmp_path, kind, way):
    folder = make_model(tmp_path / "model", kind)
    packed, padded = (policy(folder, use_remove_padding=wanted, **WAYS[way]) for wanted in (True, False))
    ours, theirs = outcome(packed), outcome(padded)
    equal(ours, theirs, is_exact=way != "bfloat16")
    assert packed.largest_micro_batch < padded.largest_micro_batch
    prompt, completion = (1, 2, 3), (4, 5, 6, 7)
    assert packed.logprobs(prompt, completion) == pytest.approx(padded.logprobs(prompt, completion), abs=1e-2)


@pytest.mark.slow
def test_a_mask_of_all_by_all_does_it_too_where_it_is_asked_for(tmp_path):
    folder = make_model(tmp_path / "model")
    settings = {"attn_implementation": "eager"}
    equal(outcome(policy(folder, use_remove_padding=True, **settings)), outcome(policy(folder, **settings)))


def over_bounds(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """As torch documents `varlen_attn`: [tokens, heads, size], on the CPU."""
    assert cu_seq_q.dtype is torch.int32 and max_q == max_k == int(cu_seq_q.diff().max())
    left, right = window_size
    assert right == 0
    parts = []
    for begin, end in itertools.pairwise(cu_seq_q.tolist()):
        q, k, v = (one[begin:end].transpose(0, 1) for one in (query, key, value))
        n = end - begin
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        seen &= seen if left < 0 else torch.ones(n, n, dtype=torch.bool).triu(-left)
        k, v = (one.repeat_interleave(len(q) // len(one), dim=0) for one in (k, v))
        parts.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale))
    return torch.cat(parts, dim=1).transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchs_kernel_is_given_what_it_documents(tmp_path, monkeypatch, kind, dtype):
    real, dtypes = inspect.signature(varlen.varlen_attn), set()

    def stand_in(*given, **named):
        real.bind(*given, **named)
        dtypes.add(given[0].dtype)
        return over_bounds(*given, **named)

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(packed_attention, "_ways", lambda actor, device: (VARLEN,) if actor.use_remove_padding else ())
    folder = make_model(tmp_path / "model", kind)
    packed, padded = (policy(folder, use_remove_padding=wanted, dtype=dtype) for wanted in (True, False))
    assert packed._part.model.config._attn_implementation == VARLEN
    equal(outcome(packed), outcome(padded), is_exact=dtype == "float32")
    assert dtypes == {getattr(torch, dtype)}


def sees_all(module, query, key, value, attention_mask, *, lengths, scaling=None, **_):
    return sdpa_attention_forward(module, query, key, value, None, scaling=scaling)


def sees_the_last(module, query, key, value, attention_mask, *, lengths, scaling=None, **_):
    """Its own sequence, and of the one before only the last token."""
    n = sum(lengths)
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    last = torch.tensor(lengths).cumsum(0) - 1
    seen = torch.ones(n, n, dtype=torch.bool).tril() & (of.unsqueeze(1) == of.unsqueeze(0))
    for before in range(len(lengths) - 1):
        seen[of == before + 1, last[before]] = True
    return sdpa_attention_forward(module, query, key, value, seen, scaling=scaling)


def fails(*_given, **_named):
    raise NotImplementedError("no kernel image\nis available")


@pytest.fixture
def instead(monkeypatch):
    def put(function):
        monkeypatch.setitem(AttentionInterface._global_mapping, EACH, function)

    return put


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (sees_all, r"sdpa_each: log-probs are .* nats off, \d+% of a leak"),
        (sees_the_last, "nats off"),
        (fails, "sdpa_each: NotImplementedError no kernel image;? ?.*"),
    ],
)
def test_what_does_not_keep_sequences_apart_is_refused(tmp_path, instead, dtype, function, said):
    instead(function)
    folder = make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=said) as refused:
        policy(folder, use_remove_padding=True, dtype=dtype)
    assert "actor.use_remove_padding=false" in str(refused.value)


def test_by_itself_a_gpu_packs_and_what_fails_there_leaves_padding(tmp_path, instead, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="trainer")
    folder = make_model(tmp_path / "model")
    assert "none, sdpa, cpu" in said_of(policy(folder), caplog)
    assert "false, sdpa, cpu" in said_of(policy(folder, use_remove_padding=False), caplog)
    monkeypatch.setattr(packed_attention, "_ways", lambda actor, device: ("sdpa_varlen", EACH))
    packed = policy(folder)
    note = said_of(packed, caplog)
    assert "packed without padding, by sdpa_each" in note and packed._part.objective.packs
    instead(sees_all)
    padded = policy(folder)
    note = said_of(padded, caplog)
    assert "sequences are padded (sdpa_varlen: " in note and "sdpa_each: log-probs are" in note
    assert not padded._part.objective.packs
    assert padded._part.model.config._attn_implementation == "sdpa"
    assert padded.compute_gradients(make_groups()).finite


def said_of(model, caplog):
    assert all(parameter.grad is None for parameter in model._part.parameters.values()), "of the trial"
    return [record.getMessage() for record in caplog.records if record.name == "trainer"][-1]


@pytest.mark.parametrize(
    ("wanted", "attention", "device", "expected"),
    [
        (None, "sdpa", "cpu", ()),
        (None, "sdpa", "cuda", (VARLEN, EACH)),
        (None, "flash_attention_2", "cuda", ("flash_attention_2",)),
        (None, "eager", "cuda", ()),
        (True, "eager", "cuda", ("eager",)),
        (True, "sdpa", "cpu", (EACH,)),
        (False, "flash_attention_2", "cuda", ()),
    ],
)
def test_which_ways_are_tried(wanted, attention, device, expected):
    config = actor("model", use_remove_padding=wanted, attn_implementation=attention)
    assert tuple(packed_attention._ways(config, torch.device(device))) == expected


def test_where_a_leak_would_not_show_nothing_is_packed(tmp_path):
    uniform = make_model(tmp_path / "model", initializer_range=1e-9)
    with pytest.raises(ConfigError, match="nan"):
        policy(uniform, use_remove_padding=True)


def test_layout_by_hand():
    sequences = [
        SampledSequence(prompt=(5,), completion=(6, 7), logprobs=(-0.1, -0.2)),
        SampledSequence(prompt=(1, 2, 3), completion=(4,), logprobs=(-0.3,)),
    ]
    ((batch,), (empty,)) = share_out(sequences[:1] + sequences[1:], [True, True], 100, ranks=2, packs=True)
    assert (batch.lengths, empty.lengths) == ((4,), (3,))
    ((batch,),) = share_out(sequences, [True, True], 100, ranks=1, packs=True)
    assert batch.lengths == (4, 3)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.positions.tolist() == [2, 4, 5]
    assert batch.targets.tolist() == [4, 6, 7]
    arguments = packed_attention.packed_arguments(batch.lengths, VARLEN, torch.device("cpu"))
    assert arguments["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert arguments["cu_seq_lens_q"].tolist() == [0, 4, 7] and arguments["max_length_q"] == 4


@pytest.mark.slow
@given(st.lists(st.integers(1, 40)), st.integers(40, 200))
def test_every_sequence_is_in_one_micro_batch_and_none_is_too_large(lengths, max_tokens):
    filled = fill(lengths, max_tokens=max_tokens)
    assert sorted(index for one in filled for index in one) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in one) <= max_tokens for one in filled)


def test_micro_batches_are_as_few_as_can_be_and_of_one_size():
    assert [sum((9, 3, 3, 9, 1, 1)[index] for index in one) for one in fill([9, 3, 3, 9, 1, 1], max_tokens=20)] == [
        13,
        13,
    ]
    assert fill([], max_tokens=20) == []
    with pytest.raises(ConfigError, match=r"17 tokens does not fit .* 16"):
        fill([3, 17], max_tokens=16)
