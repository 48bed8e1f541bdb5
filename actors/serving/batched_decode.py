"""Decode attention of SGLang's `torch_native` backend in one call for the complete batch.

SGLang 0.5.17 loops over the requests there (and says in its source that this wants optimizing), which is half of a
decode step's time for a small model. The sum is the same, but for its rounding; padding every request to the longest
costs less than the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

PADDING_SLOT = 0
"""Of the KV pool; SGLang keeps it for padding, so what is read there is finite, and is masked."""


def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    *,
    scaling: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The attention of one new token per request over its own tokens.

    `query` is (requests, heads, size), the caches (slots, kv heads, size); `req_to_token[pool index]` lists the slots
    of a request's tokens, of which the first `seq_lens` count. Returns (requests, heads, size).
    """
    longest = int(seq_lens.max())
    real = torch.arange(longest, device=seq_lens.device) < seq_lens[:, None]
    slots = req_to_token[req_pool_indices, :longest].masked_fill(~real, PADDING_SLOT).long()
    keys, values = (cache[slots].transpose(1, 2).to(query.dtype) for cache in (k_cache, v_cache))
    return scaled_dot_product_attention(
        query[:, :, None],
        keys,
        values,
        attn_mask=real[:, None, None],
        scale=scaling,
        enable_gqa=enable_gqa,
    )[:, :, 0]


def install() -> None:
    """Use it in SGLang from now on, wherever a request attends to all its tokens and to nothing else."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    one_by_one: Callable[..., Tensor] = TorchNativeAttnBackend._run_sdpa_forward_decode  # noqa: SLF001

    def run(
        self: Any,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        place = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
        if encoder_lens is not None or is_cross_attn or causal or sliding_window_size is not None:
            return one_by_one(
                self,
                query,
                output,
                *place,
                encoder_lens,
                scaling,
                enable_gqa,
                causal,
                is_cross_attn,
                sliding_window_size,
            )
        return output.copy_(attend(query, *place, scaling=scaling, enable_gqa=enable_gqa))

    TorchNativeAttnBackend._run_sdpa_forward_decode = run  # noqa: SLF001
