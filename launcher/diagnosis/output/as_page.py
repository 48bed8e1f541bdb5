"""A diagnosis as one HTML file: no script, no network, readable on a phone, light or dark as the reader has it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from launcher.diagnosis.judging.causes import RankedCause
from launcher.diagnosis.judging.evidence import Evidence
from launcher.diagnosis.judging.incident_timeline import ONSET, TimelineMoment, in_brief
from launcher.diagnosis.judging.verdict import Diagnosis
from launcher.diagnosis.output.as_text import facts, headline, say_steps, signed
from launcher.diagnosis.output.diagnosis_chart import Lane, Mark, Picture, Point, draw
from launcher.diagnosis.reading.log_records import REWARD, Kind

WIDE, NARROW = 960, 380
MOST_MARKS = 500
COMMANDS = ("go on with", "settings")
LANES = {
    "checkpoints": (Kind.CHECKPOINT, Kind.CONDEMNED),
    "connections": (Kind.REFUSED, Kind.LOST, Kind.TIMEOUT, Kind.REQUEST_FAILED, Kind.ROLLOUT_FAILED),
    "servers": (Kind.SERVER_EXITED, Kind.SERVER_EXCEPTION, Kind.SERVER_WATCHDOG, Kind.SERVER_UNHEALTHY, Kind.SILENCE,
                Kind.NO_TOKENS, Kind.SERVER_READY, Kind.SERVER_LAUNCHED),
    "memory": (Kind.OUT_OF_MEMORY, Kind.KILLED_FOR_MEMORY),
    "rewards": (Kind.REWARD_TIMEOUT, Kind.REWARD_ERROR),
    "restarts": (Kind.RECOVER_RUN, Kind.RESUMED, Kind.INCIDENT, Kind.TRAINER_FAILED, Kind.RUN_ENDED),
}  # fmt: skip
TONES = {
    **dict.fromkeys(LANES["connections"], "warn"),
    **dict.fromkeys(LANES["servers"], "bad"),
    **dict.fromkeys(LANES["memory"], "bad"),
    **dict.fromkeys(LANES["rewards"], "warn"),
    Kind.SERVER_READY: "good", Kind.SERVER_LAUNCHED: "good", Kind.CHECKPOINT: "calm", Kind.CONDEMNED: "bad",
    Kind.RECOVER_RUN: "calm", Kind.RESUMED: "good", Kind.INCIDENT: "bad", Kind.TRAINER_FAILED: "bad",
}  # fmt: skip

STYLE = """
:root{--ink:#1f2430;--soft:#5b6472;--page:#fff;--card:#f6f7f9;--line:#dfe3e8;--blue:#2563eb;--bad:#c81e1e;--warn:#b45309;
--good:#047857;--calm:#64748b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa4b2;--page:#12151b;--card:#1b2029;--line:#2f3744;
--blue:#7aa7ff;--bad:#ff7b72;--warn:#f0b45b;--good:#4ad2a0;--calm:#93a1b5}}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:1000px;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.25rem;line-height:1.35;margin:.2em 0 .8em;padding-left:12px;border-left:5px solid var(--calm)}
h1.FELL,h1.STOPPED{border-color:var(--bad)}h1.RECOVERED{border-color:var(--warn)}h1.FINE{border-color:var(--good)}
h2{font-size:1rem;margin:1.6em 0 .4em}
dl{display:grid;grid-template-columns:6.5em 1fr;gap:.35em .8em;margin:0}
dt{color:var(--soft)}dd{margin:0}
code{font:14px/1.45 ui-monospace,Menlo,Consolas,monospace;background:var(--card);padding:.35em .55em;border-radius:6px;
display:block;user-select:all}
svg{display:block;max-width:100%;height:auto}
.narrow{display:none}
.grid{stroke:var(--line);stroke-width:1}.tick,.lane{fill:var(--soft);font-size:12px}.said{font-size:13px;font-weight:600}
.said.bad{fill:var(--bad)}.said.good{fill:var(--good)}
.dot{fill:var(--blue);opacity:.3}.taken{fill:var(--bad);opacity:.3}.mean{fill:none;stroke:var(--blue);stroke-width:2}
.band{fill:var(--bad);opacity:.13}.onset{stroke:var(--bad);stroke-width:1.5}
.level{stroke:var(--soft);stroke-dasharray:2 4}
.chosen{stroke:var(--good);stroke-width:1.5;stroke-dasharray:5 3}
.mark.bad{fill:var(--bad)}.mark.warn{fill:var(--warn)}.mark.good{fill:var(--good)}.mark.calm{fill:var(--calm)}
.lane{paint-order:stroke;stroke:var(--page);stroke-width:3px}
.cause{background:var(--card);border-radius:8px;padding:.6em .8em;margin:.5em 0}
.cause summary{font-weight:600;cursor:pointer}
ul{margin:.4em 0 0;padding-left:1.2em}li.for::marker{content:"+ ";color:var(--bad)}
li.against::marker{content:"− ";color:var(--good)}
.where{color:var(--soft);font-size:.85em}
table{border-collapse:collapse;width:100%;font-size:.9rem}
td,th{text-align:left;vertical-align:top;padding:.25em .6em .25em 0;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500}td.n{white-space:nowrap}tr.onset td{color:var(--bad);font-weight:600}
@media(max-width:640px){.wide{display:none}.narrow{display:block}dl{grid-template-columns:1fr}dt{margin-top:.4em}
td,th{display:inline-block;border:0;padding:0 .6em 0 0}
tr{display:block;border-bottom:1px solid var(--line);padding:.35em 0}
thead{display:none}}
"""


def to_page(diagnosis: Diagnosis) -> str:
    """The whole file."""
    title = escape(headline(diagnosis))
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f'<h1 class="{diagnosis.condition}">{title}</h1>',
            *_curve(diagnosis),
            "<h2>What is known, and what to do</h2>",
            *_facts(diagnosis),
            *_causes(diagnosis),
            *_timeline(diagnosis),
            "</body></html>\n",
        ]
    )


def _curve(diagnosis: Diagnosis) -> Iterator[str]:
    if not len(diagnosis.contents.steps):
        return
    picture = picture_of(diagnosis)
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        yield f'<div class="{name}">{draw(picture, width)}</div>'


def picture_of(diagnosis: Diagnosis) -> Picture:
    """The curve with its onset, the checkpoint to go back to, and the lanes that have something in them."""
    steps = diagnosis.contents.steps
    numbers, rewards = steps.steps.tolist(), steps.column(REWARD).tolist()
    standing = set(diagnosis.passes[-1].rows.tolist()) if diagnosis.passes else set()
    rows: list[Point] = list(zip(map(float, numbers), rewards, strict=True))
    onset, advice = diagnosis.onset, diagnosis.restore_advice
    return Picture(
        points=[point for row, point in enumerate(rows) if row in standing],
        taken_back=[p for row, p in enumerate(rows) if row not in standing and math.isfinite(p[1])],
        lanes=_lanes(diagnosis, int(max(numbers))),
        onset=None if onset is None else onset.step,
        earliest=None if onset is None else onset.earliest,
        latest=None if onset is None else onset.latest,
        level=None if onset is None else onset.before,
        chosen=None if advice is None or advice.checkpoint is None else advice.checkpoint.global_step,
    )


def _lanes(diagnosis: Diagnosis, last_step: int) -> list[Lane]:
    lanes = []
    for name, kinds in LANES.items():
        wanted = {str(kind): kind for kind in kinds}
        marks = [_mark(m, wanted[m.kind], last_step) for m in diagnosis.timeline if m.kind in wanted]
        if name == "checkpoints":
            seen = {mark.step for mark in marks}
            marks += [
                Mark(step=c.global_step, text=f"checkpoint of step {c.global_step}", tone="calm")
                for c in diagnosis.folders.checkpoints
                if c.global_step not in seen and c.global_step <= last_step
            ]
        if marks:
            marks = marks[:: -(-len(marks) // MOST_MARKS)]
            lanes.append(Lane(name=name, marks=tuple(marks)))
    return lanes


def _mark(moment: TimelineMoment, kind: Kind, last_step: int) -> Mark:
    step = min(moment.step if moment.step is not None else 0, last_step)
    last = None if moment.last_step is None else min(moment.last_step, last_step)
    times = f", {moment.count:,} times" if moment.count > 1 else ""
    return Mark(
        step=step,
        last_step=last,
        tone=TONES.get(kind, "calm"),
        text=f"step {step}: {moment.kind}{times}. {moment.text}",
    )


def _facts(diagnosis: Diagnosis) -> Iterator[str]:
    yield "<dl>"
    for label, text in facts(diagnosis):
        shown = f"<code>{escape(text)}</code>" if label in COMMANDS else escape(text)
        yield f"<dt>{escape(label)}</dt><dd>{shown}</dd>"
    yield "</dl>"


def _causes(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.causes is None:
        return
    yield "<h2>Causes, the likeliest first</h2>"
    for number, one in enumerate(diagnosis.causes.ranked):
        yield from _cause(one, is_open=number == 0 or one.score > 0)


def _cause(one: RankedCause, *, is_open: bool) -> Iterator[str]:
    where = f" ({escape(one.where)})" if one.where else ""
    yield f'<details class="cause"{" open" if is_open else ""}>'
    yield f"<summary>{escape(one.guess)}{where}: {signed(one.score)}</summary><ul>"
    yield from (_evidence("for", e) for e in one.supporting)
    yield from (_evidence("against", e) for e in one.opposing)
    if not one.supporting and not one.opposing:
        yield "<li>nothing for or against it</li>"
    yield "</ul></details>"


def _evidence(side: str, evidence: Evidence) -> str:
    where = f' <span class="where">{escape(evidence.where)}</span>' if evidence.where else ""
    return f'<li class="{side}">{escape(evidence.text)}{where}</li>'


def _timeline(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.timeline:
        return
    yield "<h2>What happened</h2><table><thead><tr><th>step</th><th>time</th><th>what</th><th>first line</th></tr>"
    yield "</thead><tbody>"
    for m in in_brief(diagnosis.timeline):
        step = say_steps(m)
        times = f" × {m.count:,}" if m.count > 1 else ""
        row = ' class="onset"' if m.kind == ONSET else ""
        yield (
            f'<tr{row}><td class="n">{step}</td><td class="n">{escape(m.time)}</td><td>{escape(m.kind)}{times}</td>'
            f'<td>{escape(m.text)} <span class="where">{escape(m.where)}</span></td></tr>'
        )
    yield "</tbody></table>"
