"""Of made runs with one cause each: which cause is named, which checkpoint is gone back to, and what that costs.

`ends_contaminated`: on weights from after the damage. `condemned`: checkpoints that stay set aside although they are
sound. `thrown_away`: committed steps from before the cause that the run, or its next command, does not have.
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.reward_series import RewardSeries
from actors.reward.recorded_answers import RecordedAnswers
from launcher.base.rollouts import Prompt
from launcher.config.schema import RunConfig
from tests.support.made_runs.restore_trial import RestoreTrial, Silent
from tests.support.made_runs.restore_world import Fault, MadeRun, Scorer, at_once


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one made run."""

    named: str
    is_right: bool
    restored: tuple[int, ...]
    ends_contaminated: bool
    condemned: int
    thrown_away: int


def one(cause: str, fault: Fault, seed: int) -> Outcome:
    rng = random.Random(f"{cause} {seed}")
    onset = rng.randint(30, 70)
    config = RunConfig(experiment_name="made")
    run = MadeRun(fault=fault, onset=onset, rng=rng)
    with tempfile.TemporaryDirectory() as folder:
        journal = Silent(Path(folder) / "events.jsonl")
        trial = RestoreTrial(
            run=run,
            config=config,
            monitor=HealthMonitor(config, journal, cast(Any, None), series=RewardSeries(), clock=lambda: trial.now),
            record=RecordedAnswers(
                defaultdict(lambda: Prompt(id="", token_ids=(1,), record={})),
                Scorer(run),
                count=config.gate.recorded,
                keep_in=Path(folder) / "recorded.json",
                submit=at_once,
                replay=run.replay,
            ),
        )
        trial.go()
    if "reward.rebased" in journal.names:
        trial.named.setdefault("data", 0)
    return _outcome(trial)


def _outcome(trial: RestoreTrial) -> Outcome:
    run, named = trial.run, "nothing"
    for name in ("reward_collapse", "data", "server_stale", "server_corrupt", "verifier_broken", "outside_weights"):
        named = name if name in trial.named else named
    is_weights = run.fault.weights is not None
    good_until = min(run.onset - 2 if is_weights else run.onset - 1, trial.furthest)
    if is_weights:
        has_until = min([*trial.restored, good_until])
    else:  # what the run holds now, or what its next command resumes from
        has_until = max(trial.shelf, default=-1) if trial.halt and not trial.named.keys() & {"server_stale"} else 10**9
        has_until = min([has_until, *([] if trial.halt else trial.restored), good_until])
        has_until = good_until if trial.named.keys() & {"server_stale", "server_corrupt"} else has_until
    allowed = {run.fault.named, "outside_weights"} if run.fault.named == "verifier_broken" else {run.fault.named}
    return Outcome(
        named=named,
        is_right=named in allowed or (run.fault.named == "data" and named == "nothing"),
        restored=tuple(trial.restored),
        ends_contaminated=run.damaged_since is not None,
        condemned=0 if is_weights else len(trial.aside),
        thrown_away=max(good_until - has_until, 0),
    )
