"""Benchmark `restores`: of made runs with one cause each, which one is named, which checkpoint is gone back to, and
what that costs.

`contaminated`: runs that end on weights from after the damage, and in brackets restores to such weights, which a
second one followed. `condemned`: checkpoints that stay set aside although they
are sound. `thrown away`: committed steps from before the cause that the run, or its next command, does not have; `of a
choice`: by how many steps an older checkpoint than the newest sound one was chosen.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.reward_series import RewardSeries
from actors.reward.recorded_answers import RecordedAnswers
from launcher.base.rollouts import Prompt
from launcher.config.schema import RunConfig
from scripts.lab.benchmark.made_data.restore_trial import SAVE_EVERY, RestoreTrial, Silent
from scripts.lab.benchmark.made_data.restore_world import CAUSES, PROMPTS, SAMPLES, Fault, MadeRun, Scorer, at_once
from scripts.lab.benchmark.measured import Measured, Points


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one made run."""

    cause: str
    seed: int
    onset: int
    named: str
    is_right: bool
    restored: tuple[int, ...]
    contaminated: int
    ends_contaminated: bool
    condemned: int
    thrown_away: int
    choice: int | None
    steps_until_named: int | None
    has_halted: bool


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
    return _outcome(cause, seed, trial)


def _outcome(cause: str, seed: int, trial: RestoreTrial) -> Outcome:
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
        cause=cause,
        seed=seed,
        onset=run.onset,
        named=named,
        is_right=named in allowed or (run.fault.named == "data" and named == "nothing"),
        restored=tuple(trial.restored),
        contaminated=trial.contaminated,
        ends_contaminated=run.damaged_since is not None,
        condemned=0 if is_weights else len(trial.aside),
        thrown_away=max(good_until - has_until, 0),
        choice=max(trial.choices, default=None),
        steps_until_named=trial.named.get(named),
        has_halted=bool(trial.halt),
    )


def measure(each: int, seed: int = 0) -> list[Outcome]:
    """`each`: made runs of each cause."""
    return [one(cause, fault, seed + number) for cause, fault in CAUSES.items() for number in range(each)]


def points_of(found: Sequence[Outcome]) -> Points:
    """`outside`: runs whose cause lies outside the weights."""
    outside = [one for one in found if CAUSES[one.cause].weights is None]
    return {
        "runs": [float(len(found))],
        "outside": [float(len(outside))],
        "wrongly_named": [float(not one.is_right) for one in found],
        "ends_contaminated": [float(one.ends_contaminated) for one in found],
        "condemned": [float(one.condemned) for one in outside],
        "thrown_away_outside": [float(one.thrown_away) for one in outside],
        "thrown_away": [float(one.thrown_away) for one in found if one not in outside],
    }


def table(found: Sequence[Outcome]) -> Iterator[str]:
    yield f"{PROMPTS} prompts × {SAMPLES} samples a step, a checkpoint every {SAVE_EVERY} steps"
    yield f"{'cause':46} {'named':42} contaminated condemned  thrown away  of a choice"
    for cause in dict.fromkeys(outcome.cause for outcome in found):
        yield _row(cause, [outcome for outcome in found if outcome.cause == cause])


def _row(cause: str, found: Sequence[Outcome]) -> str:
    named = ", ".join(f"{name} {count}" for name, count in Counter(one.named for one in found).most_common())
    thrown = [float(outcome.thrown_away) for outcome in found]
    choices = [float(outcome.choice) for outcome in found if outcome.choice is not None]
    chosen = f"{median(choices):.0f} (95 %: {np.quantile(choices, 0.95):.0f})" if choices else "-"
    contaminated = f"{sum(o.ends_contaminated for o in found)} ({sum(o.contaminated for o in found)})"
    return (
        f"{cause:46} {named:42} {contaminated:>12} {sum(o.condemned for o in found):9} "
        f"{median(thrown):5.0f}, most {max(thrown):3.0f}  {chosen}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--each", type=int, default=200, help="made runs of each cause")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first of each")


def run(arguments: argparse.Namespace) -> Measured:
    found = measure(arguments.each, arguments.seed)
    return Measured(points=points_of(found), notes=[*table(found)], raw=[asdict(one) for one in found])
