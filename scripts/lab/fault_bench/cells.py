"""The cells, in the order in which they are run: what must be believed first, then the comparison, then the parts."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.lab.fault_bench.runs import (
    DISK_ALONE,
    NEVER_SAVED,
    UNSUPERVISED,
    WITHOUT_STANDBY,
    Way,
    benchmark_run,
    preempted_run,
    restarted_run,
    storm_run,
)
from scripts.lab.fault_bench.verdicts import Mark, MarkRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`expected_s`: on two quiet cores, for the budget. `is_full`: with --full alone."""

    name: str
    arm: str
    how: str
    run: Way
    marks: tuple[Mark, ...] = ()
    expected_s: float
    is_full: bool = False


OURS = "ours"
LESS_STANDBY = "ours less the standby trainer"
RESUME = "whole job again, resumed"
BY_HAND = "whole job again, from the first step"

KINDS = "C1 C2 T1 C5 S1:seconds=4"
"""A server killed, one hung, the trainer killed, old weights, rewards of 0."""
EVERY = 10
STEPS = ("total_train_steps=60", "recover.freq_steps=5")
OFTEN_SAVED = ("recover.freq_steps=2",)
STANDING_BY = ("recovery.standby_trainers=1",)
KEPT = ("rollout.stream_interval=4",)
"""Completions of these runs have 24 tokens at most: they would come in one part, and nothing of them could be kept."""
SLOW = (
    *("health.probe_interval_s=30", "health.probe_busy_interval_s=30", "health.silence_s=31"),
    *("health.stopped_s=60", "health.proof_s=60"),
)

WHOLE = (
    Mark(measure="finished", limit=1, at_least=True),
    Mark(measure="ledger_violations", limit=0, how="sum", of="steps"),
    Mark(measure="stale_steps", limit=0, how="sum", of="steps"),
    Mark(measure="zero_reward_steps", limit=0, how="sum", of="steps"),
)
IN_A_STORM = (
    *WHOLE,
    Mark(measure="semantic_ettr", limit=0.9, at_least=True),
    Mark(measure="hang_detected_s", limit=2.0, how="worst"),
    Mark(measure="hangs_unnoticed", limit=0, how="sum"),
)
UNSEEN = (
    Mark(measure="stale_steps", limit=0, how="sum", role=MarkRole.MUST_MISS, detector="gate.distance_float32"),
    Mark(measure="zero_reward_steps", limit=0, how="sum", role=MarkRole.MUST_MISS, detector="gate.canaries"),
    Mark(
        measure="hangs_unnoticed",
        limit=0,
        how="sum",
        role=MarkRole.MUST_MISS,
        detector="health.stopped_s and silence_s",
    ),
)
TRAPS = "X-gc X-long:seconds=4 X-reward:seconds=3 X-busy:seconds=4 X-load:load_s=3,seconds=4"
FALSE = Mark(measure="alarms", limit=0, how="sum", of="steps")
FAILOVER = (
    Mark(measure="other_died_s", limit=0.1, how="worst"),
    Mark(measure="other_tokens_s", limit=0.4),
    Mark(measure="alone_tokens_s", limit=2.5),
    Mark(measure="older_versions", limit=0, how="sum"),
    Mark(measure="ledger_violations", limit=0, how="sum"),
)
MANY = "C1x12 C2x5 C7x2 T1x12 M1x5 C5x4"

CELLS = (
    Cell(
        name="noop", arm=OURS, how="4 faults that do nothing in 40 steps",
        run=storm_run("X-nonex4", "total_train_steps=40"), expected_s=60,
        marks=(Mark(measure="alarms", limit=0, how="sum", of="steps", role=MarkRole.NO_ALARM), *WHOLE),
    ),
    Cell(
        name="detectors_off", arm="ours less three detectors", how="C2 for 15 s, C5 and S1 in 35 steps",
        run=storm_run("C2:seconds=15 C5 S1:seconds=4", "total_train_steps=35", *UNSUPERVISED),
        marks=UNSEEN, expected_s=70,
    ),
    Cell(
        name="storm", arm=OURS, how=f"{KINDS}, one in about {EVERY} steps, two servers, a trainer standing by",
        run=storm_run(KINDS, *STEPS, *STANDING_BY, *KEPT), marks=IN_A_STORM, expected_s=100,
    ),
    Cell(
        name="resume", arm=RESUME, how="the same faults; a checkpoint every 5 steps",
        run=restarted_run(KINDS, EVERY, *STEPS, *DISK_ALONE), expected_s=240,
    ),
    Cell(
        name="restores", arm=OURS, how="scripts.lab.benchmark restores --each 3",
        run=benchmark_run("restores", "--each", "3"), expected_s=15,
        marks=(
            Mark(measure="ends_contaminated", limit=0, how="sum", of="runs"),
            Mark(measure="condemned", limit=0, how="sum", of="outside"),
            Mark(measure="thrown_away_outside", limit=0, how="sum", of="outside"),
        ),
    ),
    Cell(
        name="overhead", arm=f"{OURS}, and none", how="scripts.lab.benchmark supervision --pairs 8 --block 5",
        run=benchmark_run("supervision", "--pairs", "8", "--block", "5"),
        marks=(Mark(measure="overhead", limit=0.01),), expected_s=90,
    ),
    Cell(
        name="traps", arm=OURS, how=f"{TRAPS} in 80 steps, requests through a proxy",
        run=storm_run(TRAPS, "total_train_steps=80", interposed=True), marks=(FALSE, *WHOLE), expected_s=95,
    ),
    Cell(
        name="no_standby", arm=LESS_STANDBY, how="the same faults",
        run=storm_run(KINDS, *STEPS, *WITHOUT_STANDBY, *KEPT), marks=IN_A_STORM, expected_s=95,
    ),
    Cell(
        name="failover", arm=f"{OURS}: two servers, and one alone", how="scripts.lab.benchmark failover --kills 2",
        run=benchmark_run("failover", "--kills", "2"), marks=FAILOVER, expected_s=150,
    ),
    Cell(
        name="by_hand", arm=BY_HAND, how="the same faults; no checkpoint",
        run=restarted_run(KINDS, EVERY, *STEPS, *NEVER_SAVED), expected_s=255,
    ),
    Cell(
        name="storm_5", arm=OURS, how="12 faults, one in about 5 steps", is_full=True, expected_s=240,
        run=storm_run("C1x3 C2x2 C7 T1x3 M1x2 C5", "total_train_steps=67", *OFTEN_SAVED, *STANDING_BY, *KEPT),
        marks=IN_A_STORM,
    ),
    Cell(
        name="storm_1", arm=OURS, how=f"{MANY}, one in about 1 step", is_full=True, expected_s=600,
        run=storm_run(MANY, "total_train_steps=47", *OFTEN_SAVED, *STANDING_BY, *KEPT), marks=IN_A_STORM,
    ),
    Cell(
        name="slow_probes", arm="cold restarts, probes 30 s apart", how="the faults of storm",
        run=storm_run(KINDS, *STEPS, *WITHOUT_STANDBY, *SLOW),
        is_full=True, expected_s=160,
    ),
    Cell(
        name="no_kept_tokens", arm="ours less kept tokens", how="the faults of storm; completions come whole",
        run=storm_run(KINDS, *STEPS, *STANDING_BY, "rollout.stream_interval=1000"), is_full=True, expected_s=130,
    ),
    Cell(
        name="preemption", arm=OURS, how="3 evictions with 30 s notice, 1 without, each back after 5 s",
        run=preempted_run((True, True, False, True), 8, "total_train_steps=120"), is_full=True, expected_s=320,
        marks=(
            *WHOLE,
            Mark(measure="saved", limit=1, at_least=True, how="least"),
            Mark(measure="tokens_salvaged", limit=1, at_least=True),
            Mark(measure="steps_undone", limit=0, how="sum", of="steps"),
        ),
    ),
    Cell(
        name="trainer_kills", arm=f"{OURS}, and less the standby trainer", is_full=True, expected_s=6600,
        how="scripts.lab.benchmark trainer_kills --kills 150 --runs 6",
        run=benchmark_run("trainer_kills", "--kills", "150", "--runs", "6", "--gap", "4"),
        marks=(
            Mark(measure="lost", limit=0, how="sum", of="kills"),
            Mark(measure="parked_beyond_a_step_s", limit=2.0),
        ),
    ),
)  # fmt: skip
BY_NAME = {cell.name: cell for cell in CELLS}
