"""Which of the tried settings to take, and why; and what was not tried. Pure.

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
    """`best` is None where no trial can be recommended. `unexplored`: what the figures say nothing about."""

    best: TrialResult | None
    reason: str
    unexplored: tuple[str, ...]


def advise(results: Sequence[TrialResult], *, host_bytes: int | None, gpu_bytes: int | None) -> Advice:
    """`host_bytes`, `gpu_bytes`: what there is for one trial, as far as it is known."""
    finished = [result for result in results if result.word is TrialStatus.FINISHED and result.step_s is not None]
    held = [result for result in finished if not result.ran_out_of_memory]
    roomy = [result for result in held if _fits(result, host_bytes, gpu_bytes)]
    unexplored = tuple(_unexplored(results, roomy))
    if not roomy:
        why = (
            "no trial FINISHED"
            if not finished
            else "each ran out of memory"
            if not held
            else "none leaves a tenth of the memory free"
        )
        return Advice(best=None, reason=f"{why} ({len(results)} tried)", unexplored=unexplored)
    ranked = sorted(roomy, key=_step_s)
    return Advice(best=ranked[0], reason=_why(ranked, results, host_bytes, gpu_bytes), unexplored=unexplored)


def _fits(result: TrialResult, host_bytes: int | None, gpu_bytes: int | None) -> bool:
    return all(share is None or share <= 1 - HEADROOM for share in _shares(result, host_bytes, gpu_bytes))


def _shares(result: TrialResult, host_bytes: int | None, gpu_bytes: int | None) -> tuple[float | None, float | None]:
    """Of the host's and of the GPU's memory; None where one of both sizes is not known."""
    host = result.peak.all / host_bytes if result.peak.all is not None and host_bytes else None
    return host, result.peak.gpu / gpu_bytes if result.peak.gpu is not None and gpu_bytes else None


def _step_s(result: TrialResult) -> float:
    return result.step_s or 0.0


def _why(
    ranked: Sequence[TrialResult], results: Sequence[TrialResult], host_bytes: int | None, gpu_bytes: int | None
) -> str:
    best, others = ranked[0], ranked[1:]
    said = [f"the fastest step, {_step_s(best):.2f} s, of {len(ranked)} that FINISHED with memory to spare"]
    if others:
        lead = _step_s(others[0]) / _step_s(best) - 1 if _step_s(best) else 0.0
        close = "; so close that one run each can't tell them apart" if lead <= CLOSE else ""
        said.append(f"the next needs {lead:.0%} more ({others[0].trial}){close}")
    for name, share in zip(
        ("the host's memory", "its GPU's memory"), _shares(best, host_bytes, gpu_bytes), strict=True
    ):
        if share is not None:
            said.append(f"it held at most {share:.0%} of {name}")
    if all(share is None for share in _shares(best, host_bytes, gpu_bytes)):
        said.append("its memory could not be seen from here")
    out = [result for result in results if result.ran_out_of_memory]
    if out:
        said.append(f"memory ran out in {len(out)}: {', '.join(str(result.trial) for result in out)}")
    return "; ".join(said)


def _unexplored(results: Sequence[TrialResult], roomy: Sequence[TrialResult]) -> Iterator[str]:
    """Trials without an answer, and ends of the swept ranges that looked good: beyond them may be better ones."""
    unknown = [r for r in results if r.word in (TrialStatus.CUT_OFF, TrialStatus.NOT_RUN, TrialStatus.REFUSED)]
    if unknown:
        yield "no answer from " + ", ".join(f"{result.trial} ({result.word})" for result in unknown)
    halted = [r for r in results if r.word is TrialStatus.ERRORED and not r.ran_out_of_memory]
    if halted:
        yield "halted for another reason than memory: " + ", ".join(str(result.trial) for result in halted)
    if not roomy:
        return
    best = min(roomy, key=_step_s)
    for key, value in best.trial.settings.items():
        tried = _numbers(result.trial.settings[key] for result in results)
        if tried is not None and float(value) in (min(tried), max(tried)):
            side = "below" if float(value) == min(tried) else "above"
            yield f"{key} {side} {value}: the best is at the end of what was tried"


def _numbers(values: Iterator[str]) -> list[float] | None:
    try:
        return [float(value) for value in values]
    except ValueError:
        return None
