"""Durations, and the accuracy on held-out data, as short texts."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.base.messages import EvalReport
from launcher.base.wording import counted


def duration(value: float) -> str:
    """`4.2 s`, `3:07` or `2:03:07`."""
    if value < 10:
        return f"{max(value, 0.0):.1f} s"
    if value < 60:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def age(value: float) -> str:
    """`40 s`, `12 min`, `5 h`, `3 d`."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if value >= 2 * length:
            return f"{value / length:.0f} {unit}"
    return f"{max(0.0, value):.0f} s"


def clock_text(value_s: float) -> str:
    """`0:45`, `12:30`, `3:20 h`, `2 d 4 h`."""
    whole = round(value_s)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 2 * 86_400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def held_out(evals: Sequence[EvalReport]) -> str:
    """The accuracy on held-out data, of the first evaluation and of the last; "" before there is one."""
    if not evals:
        return ""
    first, last = evals[0], evals[-1]
    if first is last:
        seen = f"({counted(first.prompts, 'problem')}{without_score(first)}, version {first.policy_version} alone)"
        return f"sampled {first.sampled:.3f}   greedy {first.greedy:.3f}   {seen}"
    sampled, greedy = _before_after(first.sampled, last.sampled), _before_after(first.greedy, last.greedy)
    versions = f"version {first.policy_version} → {last.policy_version}"
    return f"sampled {sampled}   greedy {greedy}   ({last.prompts} problems{without_score(last)}, {versions})"


def without_score(report: EvalReport) -> str:
    """An addition to the number of prompts; "" where each has a score."""
    return f", {report.unscored} not scored" if report.unscored else ""


def _before_after(before: float, after: float) -> str:
    return f"{before:.3f} → {after:.3f} ({after - before:+.3f})"
