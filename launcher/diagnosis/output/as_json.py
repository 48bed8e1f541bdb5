"""A diagnosis as JSON, for programs. Keys are stable: new ones are only added; `format` changes if one is removed."""

from __future__ import annotations

from dataclasses import asdict

from launcher.diagnosis.judging.incident_timeline import in_brief
from launcher.diagnosis.judging.verdict import Diagnosis
from launcher.diagnosis.output.as_text import headline

FORMAT = "grpo-diagnosis/1"


def to_dict(diagnosis: Diagnosis) -> dict[str, object]:
    """Everything but the series itself. Steps are global steps, from 0."""
    causes, advice, remedy = diagnosis.causes, diagnosis.restore_advice, diagnosis.remedy
    return {
        "format": FORMAT,
        "verdict": str(diagnosis.condition),
        "is_failure": diagnosis.is_failure,
        "headline": headline(diagnosis),
        "onset": None if diagnosis.onset is None else asdict(diagnosis.onset),
        "other_falls": [asdict(one) for one in diagnosis.others],
        "cause": None if causes is None or causes.first is None else str(causes.first.guess),
        "cause_where": "" if causes is None or causes.first is None else causes.first.where,
        "cause_is_sure": bool(causes and causes.is_sure),
        "causes": [
            {
                "cause": str(one.guess),
                "score": one.score,
                "for": [asdict(e) for e in one.supporting],
                "against": [asdict(e) for e in one.opposing],
            }
            for one in (causes.ranked if causes else ())
        ],
        "last_good_checkpoint": None if advice is None or advice.checkpoint is None else asdict(advice.checkpoint),
        "trusted_until_step": None if advice is None else advice.until,
        "change": "" if remedy is None else remedy.change,
        "settings": [] if remedy is None else list(remedy.overrides),
        "commands": [] if advice is None else list(advice.commands),
        "timeline": [asdict(moment) for moment in in_brief(diagnosis.timeline)],
        "lost": list(diagnosis.losses),
        "notes": [*diagnosis.notes, *(causes.missing if causes else ())],
        "passed_over": list(diagnosis.contents.passed_over),
        "files": [asdict(source) for source in diagnosis.contents.sources],
    }
