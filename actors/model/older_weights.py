"""The weights of the last versions, kept to ask whether a token is of the version that its server says.

With rollouts ahead of the trainer a token may be of older weights, and how far those are from the trainer's of today
depends on the learning rate, on what is learned, and on the age. Against the weights of its own version a token's
log-prob is as near as one of current weights is: to rounding. So those are kept, in the host's memory.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actors.model.micro_batches import SampledSequence, sequences_of, share_out
from actors.model.model_part import ModelPart
from actors.model.token_logprobs import LogprobModel
from launcher.base.rollouts import RolloutGroup
from launcher.config.schema import ActorConfig

MOST_CHECKED = 4
"""Sequences of each server and version: those that are farthest from the trainer's weights of today."""


class OlderWeights:
    """Of one process that holds the complete model: ranks that hold slices can't compute alone. One thread's."""

    def __init__(self, part: ModelPart, actor: ActorConfig, device: torch.device, *, most: int) -> None:
        """`most`: versions kept; 0: none, and nothing is asked."""
        self._part = part
        self._device = device
        self._most = most
        self._max_tokens = actor.mb_spec.max_tokens_per_mb
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._twin: LogprobModel | None = None

    def keep(self, version: int) -> None:
        """The weights as they are now, before the step that ends `version`."""
        if not self._most or version in self._kept:
            return
        self._kept = {known: one for known, one in self._kept.items() if version - self._most < known < version}
        self._kept[version] = {name: one.detach().to("cpu", copy=True) for name, one in self._part.parameters.items()}

    def forget(self) -> None:
        """The versions to come are counted from another one."""
        self._kept = {}

    @torch.no_grad()
    def distances(self, groups: Sequence[RolloutGroup], far: Tensor, *, version: int) -> dict[tuple[str, int], float]:
        """Mean |server's - trainer's log-prob| in nats at the weights that the tokens are said to be of, by server and
        version, of completions that older weights than `version` have begun; `far` [sequences]: their sums of it at
        the weights of `version`. Without versions that aren't kept.
        """
        if not self._most:
            return {}
        wanted: dict[int, list[SampledSequence]] = {}
        for one in _farthest(sequences_of(groups), far.tolist(), version):
            if one.version == version or one.version in self._kept:
                wanted.setdefault(one.version, []).append(one)
        found: dict[tuple[str, int], float] = {}
        for of_version, sequences in wanted.items():
            found |= self._of_version(of_version, sequences, self._kept.get(of_version, {}))
        if found:
            self._share({})  # an older version's memory is not needed any more
        return found

    def _of_version(
        self, version: int, sequences: Sequence[SampledSequence], weights: Mapping[str, Tensor]
    ) -> dict[tuple[str, int], float]:
        sums, tokens = Counter[str](), Counter[str]()
        twin = self._share(weights)
        (micro_batches,) = share_out(sequences, [False] * len(sequences), self._max_tokens, ranks=1)
        for micro_batch in micro_batches:
            apart = self._part.objective.token_distances(twin, micro_batch.to(self._device))
            for place, by in zip(micro_batch.sequences.tolist(), apart.tolist(), strict=True):
                sums[sequences[place].server] += by
                tokens[sequences[place].server] += 1
        return {(server, version): sums[server] / count for server, count in tokens.items()}

    def _share(self, weights: Mapping[str, Tensor]) -> LogprobModel:
        """A second model of the same structure, with `weights` and for the rest the memory of the one that learns,
        which other threads may be reading."""
        own = self._part.policy
        if self._twin is None:
            mine = {id(one): torch.nn.Parameter(one.detach(), requires_grad=False) for one in own.parameters()}
            self._twin = copy.deepcopy(own, mine).requires_grad_(False)
        learned = {id(one): name for name, one in self._part.parameters.items()}
        for theirs, ours in zip(self._twin.parameters(), own.parameters(), strict=True):
            kept = weights.get(learned.get(id(ours), ""))
            theirs.data = ours.detach() if kept is None else kept.to(ours.device)
        return self._twin


def _farthest(sequences: Sequence[SampledSequence], far: Sequence[float], version: int) -> list[SampledSequence]:
    """Of each server and version the MOST_CHECKED farthest, each with its own tokens of that version alone."""
    apart: dict[tuple[str, int], list[tuple[float, int, SampledSequence]]] = {}
    for index, (one, total) in enumerate(zip(sequences, far, strict=True)):
        if one.version == version or not one.places:
            continue
        by, begin = total / len(one.places), 0
        for of_version, count in one.runs:
            own = tuple(place for place in one.places if begin <= place < begin + count)
            begin += count
            if own:
                claimed = replace(one, own=own, version=of_version)
                apart.setdefault((one.server, of_version), []).append((by, index, claimed))
    chosen: list[SampledSequence] = []
    for candidates in apart.values():
        candidates.sort(key=lambda one: (-one[0], one[1]))
        chosen += [one for _, _, one in candidates[:MOST_CHECKED]]
    return chosen
