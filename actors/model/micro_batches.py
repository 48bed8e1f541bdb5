"""Rollouts to tensors: sequences laid out in micro-batches of at most `max_tokens_per_mb` tokens, padding included.

Longest first, so that sequences of like length lie together: of GSM8K's answers 1 to 4 % is padding. Rows are padded on
the right: under causal attention no real token looks to its right, so neither a mask nor position ids are needed.
What is asked of the model is a flat list of tokens, so nothing downstream knows of rows and padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import ConfigError, TrainerError
from launcher.base.rollouts import RolloutGroup, Segment

TENSORS = (
    "input_ids",
    "positions",
    "targets",
    "sequences",
    "server_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "advantages",
)
Layout = tuple[list[int], bool]
"""One micro-batch: which sequences, none where it is empty, and whether it learns."""
PADDING = 0  # any token id does: nothing reads what the model says there


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One prompt with one of its completions, or a segment of an episode; `logprobs[t]` is the server's for
    `completion[t]`. `own`: the places of the completion that the model made and learns from; None: all.

    `rollout` is the place of its rollout in the batch, `server` who made it, `version` the oldest weights that did,
    `runs` the versions of its tokens in order, with how many each has made.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    own: tuple[int, ...] | None = None
    rollout: int = 0
    server: str = ""
    version: int = 0
    runs: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)

    @property
    def places(self) -> Sequence[int]:
        return range(len(self.completion)) if self.own is None else self.own


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward pass. All but the first have an entry for each token that the model made.

    `input_ids` [rows, width]; `positions` index the flattened hidden states [rows * width] that predict the tokens
    `targets`; `sequences` say which sequence of the batch each token is of. `learns`: it has a backward pass.
    The last three are None unless a pass before the first gradient has found them.
    """

    input_ids: Tensor
    positions: Tensor
    targets: Tensor
    sequences: Tensor
    server_logprobs: Tensor
    learns: bool
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """On a GPU: through pinned memory, so that the copy does not hold up the host."""
        if device.type == "cpu":
            return self
        sent: dict[str, Any] = {
            name: _send(tensor, device) for name in TENSORS if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **sent)


def sequences_of(groups: Sequence[RolloutGroup]) -> list[SampledSequence]:
    """All completions in order, group by group; of an episode its segments. Raises TrainerError for one that can't be
    trained on."""
    sequences: list[SampledSequence] = []
    rollouts = [(group, sample, rollout) for group in groups for sample, rollout in enumerate(group.rollouts)]
    for place, (group, sample, rollout) in enumerate(rollouts):
        whole = Segment(prompt=group.prompt.token_ids, completion=rollout.completion, own=())
        for segment in rollout.segments or (whole,):
            completion = segment.completion
            where = f"completion {sample} of prompt {group.prompt.id} from server {completion.server or '?'}"
            if len(completion.token_ids) != len(completion.logprobs):
                raise TrainerError(
                    f"{where} has {len(completion.token_ids)} tokens and {len(completion.logprobs)} log-probs",
                    "the server must return a log-prob for each token it generated",
                )
            if not segment.prompt:
                raise TrainerError(f"{where} has a prompt without tokens", "nothing predicts its first token")
            own = tuple(at for at, is_own in enumerate(segment.own) if is_own) if rollout.segments else None
            sequences.append(
                SampledSequence(
                    prompt=segment.prompt,
                    completion=completion.token_ids,
                    logprobs=completion.logprobs,
                    own=own,
                    rollout=place,
                    server=completion.server,
                    version=completion.weight_version,
                    runs=completion.runs,
                )
            )
    return sequences


def batches_of(sequences: Sequence[SampledSequence], laid: Sequence[Sequence[Layout]]) -> list[list[MicroBatch]]:
    """The micro-batches of each rank of what `lay_out` gave for these sequences."""
    return [
        [tensors_of(sequences, rows, learns) if rows else _nothing(learns) for rows, learns in share] for share in laid
    ]


def lay_out(lengths: Sequence[int], learning: Sequence[bool], max_tokens: int, *, ranks: int) -> list[list[Layout]]:
    """Every sequence once, on one of the ranks: those that teach nothing (`learning` False) apart, since they need no
    backward pass.

    All ranks get as many micro-batches, and the n-th learns on all or on none: each pass is an exchange between
    ranks, and one that another rank doesn't make would be waited for for ever. Raises as `pack`.
    """
    shares: list[list[Layout]] = [[] for _ in range(ranks)]
    for learns in (True, False):
        chosen = [index for index, flag in enumerate(learning) if flag is learns]
        divided = []
        for mine in deal([lengths[index] for index in chosen], ranks=ranks):
            own = [chosen[index] for index in mine]
            parts = pack([lengths[index] for index in own], max_tokens=max_tokens)
            divided.append([[own[row] for row in one] for one in parts])
        most = max(map(len, divided))
        for share, parts in zip(shares, divided, strict=True):
            share += [(rows, learns) for rows in parts + [[]] * (most - len(parts))]
    return shares


def tokens_in_rows(laid: Sequence[Sequence[Layout]], lengths: Sequence[int]) -> int:
    """How many tokens the model computes: each sequence has a row, as wide as the longest of its micro-batch."""
    return sum(len(rows) * max(lengths[row] for row in rows) if rows else 1 for share in laid for rows, _ in share)


def deal(lengths: Sequence[int], *, ranks: int) -> list[list[int]]:
    """Indices into `lengths` for each rank, of about as many tokens: the longest first, to who has least. So no rank
    has more than another by more than the longest."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        least = tokens.index(min(tokens))
        shares[least].append(index)
        tokens[least] += lengths[index]
    return shares


def pack(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indices into `lengths`, in micro-batches of at most `max_tokens` padded tokens (rows × longest). Deterministic.

    Raises ConfigError for a sequence that is longer than that alone.
    """
    if lengths and (longest := max(lengths)) > max_tokens:
        raise ConfigError(
            f"a sequence of {longest} tokens does not fit in a micro-batch of {max_tokens}",
            f"set actor.mb_spec.max_tokens_per_mb to at least {longest} (prompt and completion together), "
            "or make gconfig.max_new_tokens or train_dataset.max_length smaller",
        )
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    packed: list[list[int]] = []
    for index in longest_first:
        width = lengths[packed[-1][0]] if packed else 0
        if packed and (len(packed[-1]) + 1) * width <= max_tokens:
            packed[-1].append(index)
        else:
            packed.append([index])
    return packed


def tensors_of(sequences: Sequence[SampledSequence], rows: Sequence[int], learns: bool) -> MicroBatch:
    """Those of `sequences` at `rows`, each in a row of one micro-batch."""
    chosen = [sequences[row] for row in rows]
    width = max(map(len, chosen))
    starts = [row * width + len(one.prompt) - 1 for row, one in enumerate(chosen)]  # predicts the first
    return MicroBatch(
        input_ids=torch.tensor(
            [[*one.prompt, *one.completion, *[PADDING] * (width - len(one))] for one in chosen], dtype=torch.int64
        ),
        positions=_integers(start + place for start, one in zip(starts, chosen, strict=True) for place in one.places),
        targets=_integers(one.completion[place] for one in chosen for place in one.places),
        sequences=_integers(row for row, one in zip(rows, chosen, strict=True) for _ in one.places),
        server_logprobs=torch.tensor(
            [one.logprobs[place] for one in chosen for place in one.places], dtype=torch.float32
        ),
        learns=learns,
    )


def _nothing(learns: bool) -> MicroBatch:
    """One token, of which nothing is asked: a pass without figures, whose gradient is 0."""
    return MicroBatch(
        input_ids=torch.tensor([[PADDING]], dtype=torch.int64),
        positions=_integers(()),
        targets=_integers(()),
        sequences=_integers(()),
        server_logprobs=torch.tensor((), dtype=torch.float32),
        learns=learns,
    )


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
