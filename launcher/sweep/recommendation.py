"""Recommends one of the tried settings, explains why, and lists what was not tried. Pure.

The fastest step among the trials that FINISHED without running out of memory, and left a tenth of it free. A step's
time is the median of its trial; each setting was tried once, so that a lead of a few percent may be chance, and is
called so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.sweep.trial_results import TrialResult, TrialStatus

HEADROOM = 0.1
CLOSE = 0.05
"""Steps this much slower, as a share, are no different: each was measured in one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`best` is None where no trial can be recommended. `unexplored`: what the figures do not cover."""

    best: TrialResult | None
    reason: str
    unexplored: tuple[str, ...]

    def lines(self) -> list[str]:
        head = f"recommended: {self.best.trial}" if self.best is not None else "no setting can be recommended"
        return [head, f"  because: {self.reason}", *(f"  not explored: {line}" for line in self.unexplored)]


def advise(results: Sequence[TrialResult], *, host_bytes: int | None, gpu_bytes: int | None) -> Advice:
    """`host_bytes`, `gpu_bytes`: what there is for one trial, as far as it is known."""
    finished = [result for result in results if result.status is TrialStatus.FINISHED and result.step_s is not None]
    held = [result for result in finished if not result.ran_out_of_memory]
    shares = {result.trial.name: _shares(result, host_bytes, gpu_bytes) for result in held}
    roomy = [one for one in held if all(share <= 1 - HEADROOM for share in shares[one.trial.name].values())]
    ranked = sorted(roomy, key=lambda result: result.step_s or 0.0)
    best = ranked[0] if ranked else None
    if best is not None:
        reason = "; ".join(_reasons(ranked, shares[best.trial.name], results))
    elif not finished:
        reason = f"no trial FINISHED ({len(results)} tried)"
    else:
        why = "none leaves a tenth of the memory free" if held else "each ran out of memory"
        reason = f"{why} ({len(results)} tried)"
    return Advice(best=best, reason=reason, unexplored=tuple(_unexplored(results, best)))


def _shares(result: TrialResult, host_bytes: int | None, gpu_bytes: int | None) -> dict[str, float]:
    """The highest share that it held of each memory, where both sizes are known."""
    sizes = {"the host's memory": (result.peak.all, host_bytes), "its GPU's memory": (result.peak.gpu, gpu_bytes)}
    return {name: peak / size for name, (peak, size) in sizes.items() if peak is not None and size}


def _reasons(ranked: Sequence[TrialResult], shares: dict[str, float], results: Sequence[TrialResult]) -> Iterator[str]:
    best_s = ranked[0].step_s or 0.0
    yield f"the fastest step, {best_s:.2f} s, of {len(ranked)} that FINISHED with memory to spare"
    if len(ranked) > 1:
        lead = (ranked[1].step_s or 0.0) / best_s - 1 if best_s else 0.0
        close = "; so close that one run each can't separate them" if lead <= CLOSE else ""
        yield f"the next needs {lead:.0%} more ({ranked[1].trial}){close}"
    for name, share in shares.items():
        yield f"it held at most {share:.0%} of {name}"
    if not shares:
        yield "its memory could not be seen from here"
    out = [str(result.trial) for result in results if result.ran_out_of_memory]
    if out:
        yield f"memory ran out in {len(out)}: {', '.join(out)}"


def _unexplored(results: Sequence[TrialResult], best: TrialResult | None) -> Iterator[str]:
    """Trials without an answer, and ends of the swept ranges that looked good: beyond them may be better ones."""
    unknown = [r for r in results if r.status in (TrialStatus.CUT_OFF, TrialStatus.NOT_RUN, TrialStatus.REFUSED)]
    if unknown:
        yield "no answer from " + ", ".join(f"{result.trial} ({result.status})" for result in unknown)
    halted = [r for r in results if r.status is TrialStatus.ERRORED and not r.ran_out_of_memory]
    if halted:
        yield "halted for another reason than memory: " + ", ".join(str(result.trial) for result in halted)
    for key, value in best.trial.settings.items() if best is not None else ():
        try:
            tried = [float(result.trial.settings[key]) for result in results]
        except ValueError:  # words have no ends
            continue
        if float(value) in (min(tried), max(tried)):
            side = "below" if float(value) == min(tried) else "above"
            yield f"{key} {side} {value}: the best is at the end of what was tried"
