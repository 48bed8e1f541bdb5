"""A diagnosis for a person at a terminal: the answer first, then why, what to do, and what happened when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launcher.base.wording import in_one_line
from launcher.diagnosis.judging.causes import Causes, Evidence, RankedCause
from launcher.diagnosis.judging.incident_timeline import ONSET, TimelineMoment, in_brief
from launcher.diagnosis.judging.verdict import Diagnosis, Onset, RunCondition
from launcher.diagnosis.reading.log_records import NOT_READ

COLOURS = {
    RunCondition.FINE: "bold green",
    RunCondition.RECOVERED: "bold yellow",
    RunCondition.FELL: "bold red",
    RunCondition.STOPPED: "bold red",
    RunCondition.STALLED: "bold red",
    RunCondition.UNCLEAR: "bold yellow",
}
SHOWN_CAUSES = 6
LABEL = 12
COMMANDS = ("settings", "resume with")
LAST = ("note", "read", "not read")
LINE, NEW_LINE = 88, "\n"


def render(diagnosis: Diagnosis) -> RenderableType:
    """The complete text."""
    return Group(*_parts(diagnosis))


def headline(diagnosis: Diagnosis) -> str:
    """The first line: the answer."""
    return f"{diagnosis.condition}: {diagnosis.headline}"


def _parts(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    yield Text(headline(diagnosis), style=COLOURS[diagnosis.condition])
    yield Text()
    said = list(facts(diagnosis))
    if answers := [(label, text) for label, text in said if label not in COMMANDS and label not in LAST]:
        yield _facts(answers)
    for label, text in said:
        if label in COMMANDS:  # never broken: it is there to be copied
            line = Text.assemble((f"{label:<{LABEL}}", "bold"), text)
            line.no_wrap = True
            line.overflow = "ignore"
            yield line
    if diagnosis.causes is not None:
        yield Text("\ncauses, the likeliest first (+ for, − against)", style="bold")
        yield _causes(diagnosis.causes)
    if diagnosis.timeline:
        yield Text(f"{NEW_LINE if diagnosis.is_failure else ''}what happened (global steps)", style="bold")
        yield _timeline(diagnosis)
    yield Text()
    yield _facts([(label, text) for label, text in said if label in LAST])


def _facts(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid()
    table.add_column(style="bold", no_wrap=True, width=LABEL)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, Text(text))
    return table


def signed(score: int) -> str:
    return "0" if score == 0 else f"{score:+d}".replace("-", "−")


def facts(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """The facts to print, each with its label."""
    if diagnosis.onset is not None:
        yield "onset", say_onset(diagnosis.onset)
    for other in diagnosis.others:
        yield ("also" if diagnosis.is_failure else "a dip"), say_onset(other)
    if diagnosis.restore_advice is not None:
        checkpoint = diagnosis.restore_advice.checkpoint
        yield (
            "last good",
            f"{checkpoint.path} ({diagnosis.restore_advice.reason})" if checkpoint else diagnosis.restore_advice.reason,
        )
        if diagnosis.restore_advice.warning:
            yield "careful", diagnosis.restore_advice.warning
    if diagnosis.remedy is not None:
        yield "change", diagnosis.remedy.change
        if diagnosis.remedy.overrides:
            yield "settings", " ".join(diagnosis.remedy.overrides)
    if diagnosis.restore_advice is not None:
        for command in diagnosis.restore_advice.commands:
            yield "resume with", command
    if diagnosis.losses:
        yield "lost", "; ".join(diagnosis.losses)
    for note in (*diagnosis.notes, *(diagnosis.causes.missing if diagnosis.causes else ())):
        yield "note", note
    for source in diagnosis.contents.sources:
        if source.what == NOT_READ:
            continue
        steps = f", {source.steps} steps" if source.steps else ""
        yield (
            "read",
            f"{source.path} ({source.what}, {source.bytes:,} bytes{steps})"
            + (f": {source.note}" if source.note else ""),
        )
    if said := diagnosis.contents.not_read:
        yield "not read", "; ".join(said)


def say_onset(onset: Onset) -> str:
    """`global step 188 (the log's "Train step 189"), between 187 and 189, 2025-11-11 13:02:11: …`"""
    within = "" if onset.earliest == onset.latest else f", within {onset.earliest} to {onset.latest}"
    at = f", {onset.time}" if onset.time else ""
    end = "" if not onset.is_over else ", then back"
    taken = "" if onset.stands else "; a recovery took it back"
    return (
        f'global step {onset.step} (the log\'s "Train step {onset.step + 1}"){within}{at}: reward {onset.before:.3g} → '
        f"{onset.after:.3g}, {onset.shape}, {onset.bad_steps} steps{end}{taken}"
    )


def _causes(causes: Causes) -> RenderableType:
    return Group(*(Padding(_cause(one), (0, 0, 0, 2)) for one in causes.ranked[:SHOWN_CAUSES]))


def _cause(one: RankedCause) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, width=18)
    table.add_column(no_wrap=True, width=4, justify="right")
    table.add_column(overflow="fold")
    rows = [("+", e) for e in one.supporting] + [("−", e) for e in one.opposing]
    table.add_row(
        Text(str(one.guess), style="bold" if one.score > 0 else ""),
        signed(one.score),
        _evidence(*rows[0]) if rows else Text("nothing for or against it", style="dim"),
    )
    for sign, evidence in rows[1:]:
        table.add_row("", "", _evidence(sign, evidence))
    return table


def _evidence(sign: str, evidence: Evidence) -> Text:
    text = Text(f"{sign} ", style="red" if sign == "+" else "green")
    text.append(evidence.text, style="")
    if evidence.where:
        text.append(f"  {evidence.where}", style="dim")
    return text


def _timeline(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, width in (("step", 7), ("time", 19), ("what", 36)):
        table.add_column(name, no_wrap=True, min_width=width, justify="right" if name == "step" else "left")
    table.add_column("first line", overflow="ellipsis", no_wrap=True, ratio=1)
    for moment in in_brief(diagnosis.timeline):
        times = f" × {moment.count:,}" if moment.count > 1 else ""
        line = Text(in_one_line(moment.text, longest=LINE))
        if moment.where:
            line = Text.assemble((f"{moment.where}  ", "dim"), line)
        style = "bold red" if moment.kind == ONSET else ""
        table.add_row(say_steps(moment), moment.time, f"{moment.kind}{times}", line, style=style)
    return table


def say_steps(moment: TimelineMoment) -> str:
    """`188` or `188–320`."""
    if moment.step is None:
        return ""
    has_more = moment.last_step is not None and moment.last_step > moment.step
    return f"{moment.step}–{moment.last_step}" if has_more else str(moment.step)
