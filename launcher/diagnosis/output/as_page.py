"""A diagnosis as one HTML file: no script, no network, readable on a phone, light or dark as the reader has it."""

from __future__ import annotations

from pathlib import Path

from launcher.diagnosis.judging.incident_timeline import ONSET, in_brief
from launcher.diagnosis.judging.verdict import Diagnosis
from launcher.diagnosis.output.as_text import COMMANDS, facts, headline, say_steps, signed
from launcher.diagnosis.output.diagnosis_chart import diagnosis_chart
from launcher.html_report.page_template import render_page


def to_page(diagnosis: Diagnosis) -> str:
    """The complete file."""
    page = render_page(
        Path(__file__).parent / "diagnosis.html.j2",
        title=headline(diagnosis),
        condition=str(diagnosis.condition),
        picture=diagnosis_chart(diagnosis),
        facts=list(facts(diagnosis)),
        commands=COMMANDS,
        causes=diagnosis.causes.ranked if diagnosis.causes else (),
        signed=signed,
        timeline=in_brief(diagnosis.timeline),
        say_steps=say_steps,
        onset=ONSET,
    )
    return page.decode()
