"""A causal language model as training asks it: the log-probs of given tokens, which is its whole forward pass.

One module around model and head, so that what is done before and after a forward pass (gathering what other ranks
hold) happens once for both.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.model.token_logprobs import token_logprobs


class LogprobModel(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, positions: Tensor, targets: Tensor, *, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of `targets` and the entropies there, both [tokens], float32.

        `positions` index the flattened hidden states of `input_ids` [rows, width], one for each target.
        """
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        predicting = hidden.flatten(0, 1).index_select(0, positions)
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return token_logprobs(head, predicting, targets, temperature=temperature)
