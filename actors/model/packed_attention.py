"""Several sequences in one row without padding, none of which attends to another: how, and whether it holds here.

    [A A A B B C C C C]     lengths 3, 2, 4: each token's position and what it attends to begin anew in its sequence

Flash attention does that by itself, given where sequences begin. For SDPA there are two ways, which transformers is
told of: torch's kernel for sequences of any lengths (VARLEN, on a GPU), and a call for each sequence (EACH, anywhere).
A way counts only after `find_packing` has tried it on the model at hand: log-probs and gradients of sequences packed
against the same ones apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from actors.model.micro_batches import MicroBatch, SampledSequence, tensors_of
from launcher.base.errors import ConfigError
from launcher.config.schema import ActorConfig

SDPA, EACH, VARLEN = "sdpa", "sdpa_each", "sdpa_varlen"
LENGTHS = (7, 31, 18)
"""Tokens of the sequences of the trial."""
BOUNDS = {"float32": (1e-3, 1e-2), "bfloat16": (0.05, 0.15)}
"""How far apart what should be equal may be: log-probs in the mean, in nats; gradients, relative."""
SHARE_OF_A_LEAK = 0.25
"""Of what log-probs move by where sequences do see each other, they may move at most by this where they must not."""
FAILURES = (RuntimeError, ValueError, TypeError, KeyError, ImportError)


class PackingTrial(NamedTuple):
    """Log-probs [tokens] of the trial's sequences, and of their sum the gradient of some parameters, flat."""

    logprobs: Tensor
    gradient: Tensor


class Packing(NamedTuple):
    """`attention`: as transformers names it, or "": sequences are padded. `note`: why, for the log."""

    attention: str
    note: str


def packed_arguments(lengths: Sequence[int], attention: str, device: torch.device) -> dict[str, Any]:
    """What a transformers model is given beside the tokens of one row of sequences of `lengths` tokens."""
    if not lengths:
        return {}
    given: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0).to(device)}
    if attention == EACH:
        return given | {"lengths": tuple(lengths)}
    bounds, longest = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device), max(lengths)
    lasts = {"max_length_q": longest, "max_length_k": longest}
    return given | {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds} | lasts


def find_packing(
    model: PreTrainedModel,
    actor: ActorConfig,
    device: torch.device,
    *,
    tried: Callable[[Sequence[MicroBatch]], PackingTrial],
    farthest: Callable[[Tensor], Tensor],
) -> Packing:
    """The first way that keeps sequences apart on `model`, which is left with it. `tried`: a forward and a backward
    pass over each row. `farthest`: the largest over all ranks, so that all come to the same answer.

    Raises ConfigError where actor.use_remove_padding demands one and there is none.
    """
    ways, own, reasons = _ways(actor, device), actor.attn_implementation, list[str]()
    if ways:
        texts = _trial_texts(int(model.config.vocab_size))
        together = tensors_of(texts, range(len(texts)), True, True)
        apart = tried([tensors_of(texts, [row], True, False) for row in range(len(texts))])
        leaky = tried([replace(together, lengths=())])
    for way in ways:
        try:
            model.set_attn_implementation(way)
            found = tried([together])
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            reasons.append(f"{way}: {type(error).__name__} {str(error).strip().partition(chr(10))[0]}")
            continue
        if not (wrong := _difference(found, apart, leaky, BOUNDS[actor.dtype], farthest)):
            return Packing(way, f"sequences are packed without padding, by {way}: tried, and none sees another")
        reasons.append(f"{way}: {wrong}")
    model.set_attn_implementation(own)
    why = "; ".join(reasons) or f"actor.use_remove_padding={actor.use_remove_padding}, {own}, {device.type}".lower()
    if actor.use_remove_padding:
        raise ConfigError(
            f"actor.use_remove_padding=true, and no attention keeps packed sequences apart here ({why})",
            "set actor.use_remove_padding=false, or actor.attn_implementation=sdpa",
        )
    return Packing("", f"sequences are padded ({why})")


def _ways(actor: ActorConfig, device: torch.device) -> Sequence[str]:
    """Others than SDPA and flash attention are given a mask of all tokens by all tokens, so only who asks gets it."""
    wanted, own, is_cpu = actor.use_remove_padding, actor.attn_implementation, device.type == "cpu"
    if wanted is False or (wanted is None and (is_cpu or (own != SDPA and "flash" not in own))):
        return ()
    if own == SDPA:
        return (EACH,) if is_cpu else (VARLEN, EACH)
    return (own,)


def _trial_texts(vocabulary: int) -> list[SampledSequence]:
    """Random tokens, on all ranks the same; each but the first is predicted."""
    source = random.Random(0)
    texts = [tuple(source.randrange(vocabulary) for _ in range(n)) for n in LENGTHS]
    return [SampledSequence(prompt=text[:1], completion=text[1:], logprobs=(0.0,) * len(text[1:])) for text in texts]


def _difference(
    found: PackingTrial,
    apart: PackingTrial,
    leaky: PackingTrial,
    bounds: tuple[float, float],
    farthest: Callable[[Tensor], Tensor],
) -> str:
    """ "" where `found` is as `apart`, else what is wrong. Where `leaky` is as `apart` too, a leak would not show."""
    off, leak = ((one.logprobs - apart.logprobs).abs().mean() for one in (found, leaky))
    turned = (found.gradient - apart.gradient).norm() / apart.gradient.norm()
    distance, gradient, part = farthest(torch.stack([off, turned, off / leak])).tolist()
    if distance <= bounds[0] and gradient <= bounds[1] and part <= SHARE_OF_A_LEAK:  # false for NaN
        return ""
    return f"log-probs are {distance:.2g} nats off, {part:.0%} of a leak; gradients {gradient:.1%}"


# ── the two ways of SDPA: `query` [1, heads, tokens, size], the answer [1, tokens, heads, size] ──


def _each(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    lengths: Sequence[int],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    found = []
    for q, k, v in zip(*(torch.split(one, list(lengths), dim=2) for one in (query, key, value)), strict=True):
        attended, _none = sdpa_attention_forward(module, q, k, v, _window(q, sliding_window), scaling=scaling)
        found.append(attended)
    return torch.cat(found, dim=1), None


def _window(query: Tensor, size: int | None) -> Tensor | None:
    """Which of `size` tokens, itself included, each attends to [tokens, tokens]; None: all before it."""
    n = query.shape[2]
    if size is None or n <= size:
        return None
    everything = torch.ones(n, n, dtype=torch.bool, device=query.device)
    return everything.tril() & everything.triu(1 - size)


def _varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    from torch.nn.attention.varlen import varlen_attn

    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype  # not cast for it
    q, k, v = (one[0].transpose(0, 1).to(dtype) for one in (query, key, value))
    attended = varlen_attn(
        q,
        k,
        v,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
    )
    assert isinstance(attended, Tensor)
    return attended.unsqueeze(0), None


AttentionInterface.register(EACH, _each)
AttentionInterface.register(VARLEN, _varlen)
