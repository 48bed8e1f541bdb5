"""Attention of a whole decode step at once against the same sum, one request at a time."""

import math

import pytest
import torch

from actors.serving.batched_decode import PADDING_SLOT, attend

SLOTS, LONGEST = 64, 12


def one_by_one(query, k_cache, v_cache, req_to_token, pool, seq_lens, scaling):
    """Softmax attention as it is written down, in double precision."""
    out = []
    for request, (index, length) in enumerate(zip(pool.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[index, :length].long()
        repeat = query.shape[1] // k_cache.shape[1]
        keys = k_cache[slots].repeat_interleave(repeat, 1).double()
        values = v_cache[slots].repeat_interleave(repeat, 1).double()
        weights = torch.softmax(torch.einsum("hd,thd->ht", query[request].double(), keys) * scaling, -1)
        out.append(torch.einsum("ht,thd->hd", weights, values))
    return torch.stack(out)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", [[1], [12], [1, 5, 12, 3]])
def test_the_batch_is_the_sum_of_its_requests(heads, kv_heads, lengths):
    torch.manual_seed(len(lengths) + heads)
    caches = [torch.randn(SLOTS, kv_heads, 8) for _ in range(2)]
    req_to_token = torch.randint(1, SLOTS, (9, LONGEST + 4), dtype=torch.int32)
    pool = torch.randperm(9)[: len(lengths)]
    query, seq_lens, scaling = torch.randn(len(lengths), heads, 8), torch.tensor(lengths), 1 / math.sqrt(8)
    got = attend(query, *caches, req_to_token, pool, seq_lens, scaling=scaling, enable_gqa=heads != kv_heads)
    wanted = one_by_one(query, *caches, req_to_token, pool, seq_lens, scaling)
    assert torch.allclose(got.double(), wanted, atol=1e-6)


def test_what_lies_beyond_a_request_does_not_reach_it():
    """Not even a NaN, which a weight of zero would let through."""
    keys = torch.full((SLOTS, 1, 8), math.nan)
    keys[[PADDING_SLOT, 1, 2, 3]] = 1.0
    req_to_token = torch.full((2, LONGEST), 40, dtype=torch.int32)
    req_to_token[0, :1] = 1
    req_to_token[1, :3] = torch.tensor([1, 2, 3])
    out = attend(
        torch.ones(2, 1, 8),
        keys,
        keys,
        req_to_token,
        torch.tensor([0, 1]),
        torch.tensor([1, 3]),
        scaling=1.0,
        enable_gqa=False,
    )
    assert torch.equal(out, torch.ones(2, 1, 8))
