"""Log-probs of given tokens under a causal language model, without ever holding [all tokens, vocabulary].

With a vocabulary of 152k, 16k tokens of float32 logits are 10 GB, and as much again for their gradient. So the head
is applied to a piece of the tokens at a time, and under a gradient each piece is computed again in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

LOGITS_AT_ONCE = 1 << 26
"""Logits of one piece: 256 MiB of float32, and about three times that while its gradient is made. A fused
kernel (Liger 0.8.5) takes less memory, but gives no entropy, which each step reports."""


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
        entropy_learns: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of `targets` and the entropies there, both [tokens], float32.

        `positions` index the flattened hidden states of `input_ids` [rows, width], one for each target.
        """
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        predicting = hidden.flatten(0, 1).index_select(0, positions)
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        temperature *= getattr(self.model.config, "logits_scaling", 1.0)  # Granite's logits are divided by it
        return token_logprobs(head, predicting, targets, temperature=temperature, entropy_learns=entropy_learns)


def token_logprobs(
    head: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    logits_at_once: int = LOGITS_AT_ONCE,
    entropy_learns: bool = False,
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p for each token: both [tokens], float32.

    `hidden` is [tokens, d], `targets` [tokens]. p is the distribution that was sampled from, softmax(logits /
    temperature), as SGLang reports its log-probs.
    The entropy, in nats, carries a gradient only where it `entropy_learns`.
    """
    at_once = max(1, logits_at_once // head.out_features)
    if len(targets) <= at_once:
        return _piece(head, hidden, targets, temperature, entropy_learns)
    pieces = [
        _again_in_backward(head, piece, wanted, temperature, entropy_learns)
        for piece, wanted in zip(torch.split(hidden, at_once), torch.split(targets, at_once), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def _piece(
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, entropy_learns: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    if temperature != 1:
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_learns and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def _again_in_backward(
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, entropy_learns: bool
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = checkpoint(
        _piece,
        head,
        hidden,
        targets,
        temperature,
        entropy_learns,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing in it is random; saving the state costs a sync on a GPU
    )
    return result
