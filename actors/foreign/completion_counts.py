"""What another project's trainer was answered, counted at the door: how many completions, how long, how likely.

Not their rewards, which its workflow makes of them. Beside a fall of these they show whether the completions changed
too: where they did not, what scores them is the first thing to look at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Any, Self

from launcher.run_files.journal import Record, number_of

COUNT, TOKENS, CUT, LOGPROB = "door/completions", "door/tokens/avg", "door/cut_share", "door/logprob/avg"
COMPARED = {TOKENS: "tokens", LOGPROB: "mean log-prob", CUT: "share cut at the limit"}
STEPS_BEFORE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCounts:
    """Sums since the door's process began, of completions that were not aborted. `cut`: those that ended at their
    token limit. `scored`: tokens with a log-prob, whose sum is `logprob`, in nats."""

    completions: int = 0
    tokens: int = 0
    cut: int = 0
    scored: int = 0
    logprob: float = 0.0

    def plus(self, answer: Mapping[str, Any]) -> Self:
        """With one answer of SGLang's to /generate."""
        meta = answer["meta_info"]
        how = (meta.get("finish_reason") or {}).get("type")
        if how == "abort":
            return self
        scores = [float(one[0]) for one in meta.get("output_token_logprobs") or () if one[0] is not None]
        return type(self)(
            completions=self.completions + 1,
            tokens=self.tokens + len(answer["output_ids"]),
            cut=self.cut + (how == "length"),
            scored=self.scored + len(scores),
            logprob=self.logprob + math.fsum(scores),
        )

    def figures_since(self, before: Self | None) -> dict[str, float]:
        """For a line of metrics.jsonl: of the completions since; empty where there were none, or where the door that
        counted `before` is another one."""
        if before is None or before.completions >= self.completions:
            return {}
        count, tokens, cut, scored, logprob = (
            now - then for now, then in zip(astuple(self), astuple(before), strict=True)
        )
        figures = {COUNT: float(count), TOKENS: tokens / count, CUT: cut / count}
        return figures | ({LOGPROB: logprob / scored} if scored else {})


def compared(lines: Sequence[Record], onset_step: int) -> str:
    """What the completions were like from a step on, and in STEPS_BEFORE before it; "" where that is not known.

    `lines`: the current ones of metrics.jsonl."""
    before = [line for line in lines if number_of(line.get("global_step")) < onset_step][-STEPS_BEFORE:]
    since = [line for line in lines if number_of(line.get("global_step")) >= onset_step]
    said = []
    for key, what in COMPARED.items():
        values = [[x for line in part if math.isfinite(x := number_of(line.get(key)))] for part in (since, before)]
        if all(values):
            said.append(f"{what} {fmean(values[0]):.3g} ({fmean(values[1]):.3g} before)")
    return f"its completions meanwhile: {', '.join(said)}" if said else ""
