"""Log-probs of given tokens under a causal language model, without ever holding [all tokens, vocabulary].

With a vocabulary of 152k, 16k tokens of float32 logits are 10 GB, and as much again for their gradient. So the head
is applied to a piece of the tokens at a time, and under a gradient each piece is computed again in the backward pass.
Of a piece only the probabilities are kept for its gradient: a target's log-prob is its logit less logsumexp(logits).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

LOGITS_AT_ONCE = 1 << 26
"""Logits of one piece: 256 MiB of float32, and two and a half times that while its gradient is made."""


class LogprobModel(nn.Module):
    """Model and head in one module, so that what surrounds a forward pass (FSDP's gathering) happens once for both."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        targets: Tensor,
        *,
        temperature: float,
        wants_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of `targets`, and the entropies there or None, both [tokens], float32.

        `positions` index the flattened hidden states of `input_ids` [rows, width], one for each target.
        """
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        predicting = hidden.flatten(0, 1).index_select(0, positions)
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        temperature *= getattr(self.model.config, "logits_scaling", 1.0)  # Granite's logits are divided by it
        return token_logprobs(head, predicting, targets, temperature=temperature, wants_entropy=wants_entropy)


def token_logprobs(
    head: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    logits_at_once: int = LOGITS_AT_ONCE,
    wants_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) of each token, [tokens], float32; and where asked for the entropy of p in nats, else None.

    `hidden` is [tokens, d], `targets` [tokens]. p is the distribution that was sampled from, softmax(logits /
    temperature), as SGLang reports its log-probs. Both carry a gradient.
    """
    at_once = max(1, logits_at_once // head.out_features)
    if len(targets) <= at_once:
        return _piece(head, hidden, targets, temperature, wants_entropy)
    pieces = [
        _again_in_backward(head, piece, wanted, temperature, wants_entropy)
        for piece, wanted in zip(torch.split(hidden, at_once), torch.split(targets, at_once), strict=True)
    ]
    entropies = [entropy for _, entropy in pieces if entropy is not None]
    return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat(entropies) if entropies else None


def _piece(
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, wants_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    found: tuple[Tensor, Tensor | None] = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        head(hidden), targets, temperature, wants_entropy
    )
    return found


class _TargetLogprobs(torch.autograd.Function):
    """log p(target) [n] and the entropy of p [n] or None, p = softmax(logits / temperature), of logits [n, vocabulary].

    In place of autograd through log_softmax, which keeps all log-probs, and for the gradient of a target's makes
    another two tensors of the size of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, wants_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        shifted = logits - logits.amax(dim=-1, keepdim=True).float()  # float32, a tensor of our own
        if temperature != 1:
            shifted /= temperature
        p = torch.softmax(shifted, dim=-1)
        at = targets.unsqueeze(-1)
        # the largest p is e^0 over the sum, and never as small as to be rounded to 0, as the target's may be
        log_sum = -p.amax(dim=-1).log()
        logprobs = shifted.gather(-1, at).squeeze(-1) - log_sum
        entropy = log_sum - shifted.mul_(p).sum(dim=-1) if wants_entropy else None
        ctx.save_for_backward(p, at, entropy)
        ctx.temperature = temperature
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        p, at, entropy = ctx.saved_tensors
        gradient: Tensor | None = None
        if of_logprobs is not None:  # 1 - p at the target, -p elsewhere
            scale = of_logprobs.unsqueeze(-1) / ctx.temperature
            gradient = (p * -scale).scatter_add_(-1, at, scale)
        if of_entropy is not None:  # -p · (log p + entropy)
            scale = of_entropy.unsqueeze(-1) / ctx.temperature
            slope = torch.xlogy(p, p).addcmul_(p, entropy.unsqueeze(-1)).mul_(-scale)
            gradient = slope if gradient is None else gradient.add_(slope)
        return None if gradient is None else gradient.to(ctx.dtype), None, None, None


def _again_in_backward(
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, wants_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    result: tuple[Tensor, Tensor | None] = checkpoint(
        _piece,
        head,
        hidden,
        targets,
        temperature,
        wants_entropy,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing in it is random; saving the state costs a sync on a GPU
    )
    return result
