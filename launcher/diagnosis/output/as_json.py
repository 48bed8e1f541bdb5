"""A diagnosis for programs. Keys are stable: what is added comes beside them; `format` changes where one goes."""

from __future__ import annotations

from dataclasses import asdict

from launcher.diagnosis.judging.incident_timeline import in_brief
from launcher.diagnosis.judging.verdict import Diagnosis, Onset
from launcher.diagnosis.output.as_text import headline

FORMAT = "grpo-diagnosis/1"


def to_dict(diagnosis: Diagnosis) -> dict[str, object]:
    """Everything but the series itself. Steps are global steps, from 0."""
    causes, way_back, remedy = diagnosis.causes, diagnosis.way_back, diagnosis.remedy
    return {
        "format": FORMAT,
        "verdict": str(diagnosis.word),
        "is_failure": diagnosis.is_failure,
        "headline": headline(diagnosis),
        "onset": None if diagnosis.onset is None else _onset(diagnosis.onset),
        "other_falls": [_onset(one) for one in diagnosis.others],
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
        "last_good_checkpoint": None
        if way_back is None or way_back.checkpoint is None
        else asdict(way_back.checkpoint),
        "trusted_until_step": None if way_back is None else way_back.until,
        "change": "" if remedy is None else remedy.change,
        "settings": [] if remedy is None else list(remedy.overrides),
        "commands": [] if way_back is None else list(way_back.commands),
        "timeline": [asdict(moment) for moment in in_brief(diagnosis.timeline)],
        "notes": [*diagnosis.notes, *(causes.missing if causes else ())],
        "files": [asdict(source) for source in diagnosis.contents.sources],
    }


def _onset(onset: Onset) -> dict[str, object]:
    return asdict(onset) | {"shape": str(onset.shape)}
