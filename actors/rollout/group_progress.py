"""What has arrived of one prompt's completions, and what the next request must ask for."""

from __future__ import annotations

from collections.abc import Sequence

from actors.serving.completions import Samples, joined
from actors.serving.sglang_client import Sampling
from launcher.base.rollouts import Completion


class GroupProgress:
    """One completion for each of `samplings`, all at `weight_version`, or with `or_newer` at least, whichever servers
    make them.

    A completion that a server has begun is continued by the next from its last token that arrived.
    """

    def __init__(
        self, token_ids: Sequence[int], samplings: Sequence[Sampling], weight_version: int, *, or_newer: bool = False
    ) -> None:
        self._token_ids = tuple(token_ids)
        self._samplings = samplings
        self._weight_version = weight_version
        self._or_newer = or_newer
        self._whole: dict[int, Completion] = {}
        self._begun: dict[int, Completion] = {}
        self.kept_tokens = 0
        """Tokens of completions that another request than the one that began them has continued."""

    def missing(self) -> list[int]:
        return [place for place in range(len(self._samplings)) if place not in self._whole]

    def request(self) -> tuple[list[tuple[int, ...]], list[Sampling]]:
        """The input and the sampling of each missing completion, in the order of `missing`."""
        inputs, samplings = [], []
        for place in self.missing():
            begun = self._begun[place].token_ids if place in self._begun else ()
            inputs.append(self._token_ids + begun)
            samplings.append(self._samplings[place].after(len(begun)))
        return inputs, samplings

    def take(self, samples: Samples) -> None:
        """The answer to the last `request`. Tokens of other weights are dropped."""
        missing = self.missing()
        for place, part in (*samples.completions.items(), *samples.begun.items()):
            if part.weight_version != self._weight_version and not (
                self._or_newer and part.weight_version > self._weight_version
            ):
                continue
            index = missing[place]
            if (before := self._begun.pop(index, None)) is not None:
                self.kept_tokens += len(before.token_ids)
                whole = joined(before, part)
            else:
                whole = part
            (self._whole if place in samples.completions else self._begun)[index] = whole

    def completions(self) -> list[Completion]:
        """All, in the order of their samplings. Raises KeyError while one is missing."""
        return [self._whole[place] for place in range(len(self._samplings))]
