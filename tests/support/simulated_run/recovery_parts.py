"""What the model of a run is made of: its settings, processes, and how long each action takes."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.base.messages import Cause, Health, ServerState, Verdict
from launcher.config.schema import RunConfig
from launcher.config.supervision import RestartConfig, RestoreConfig, RewardHealthConfig
from launcher.policy.actions import (
    AbandonServer,
    Action,
    AdmitServer,
    Halt,
    LoadWeights,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
)
from launcher.policy.exit_cause import RanOut

CONFIG = RunConfig(
    restart=RestartConfig(wait_max_s=4.0),
    restore=RestoreConfig(good_after_steps=4, same_place_steps=4, onset_margin_steps=1),
    reward_health=RewardHealthConfig(verifier_patience_s=20.0),
)
TOTAL_STEPS = 100
SAVE_EVERY = 3
SEEN_AFTER = 3
"""Steps with damaged rewards until the fall is noticed."""

SECONDS: dict[type[Action], int] = {
    PauseTrainer: 1,
    ResumeTrainer: 1,
    RestartTrainer: 3,
    RestoreTrainer: 2,
    RestartServer: 3,
    AbandonServer: 0,
    LoadWeights: 1,
    AdmitServer: 1,
    Halt: 2,
}

ALIVE = Verdict(health=Health.HEALTHY, reason="alive")
STARTING = Verdict(health=Health.UNKNOWN, reason="starting")


@dataclass
class Server:
    name: str
    state: ServerState = ServerState.STARTING
    cause: Cause | None = None
    ran_out: RanOut | None = None
    weights: tuple[int, int] | None = None  # (version, lineage), as it says
    progress_at: float | None = None


@dataclass
class Trainer:
    cause: Cause | None = None
    ran_out: RanOut | None = None
    is_loaded: bool = False
    is_paused: bool = True
    next_step: int = 0
    lineage: int = 0
    is_damaged: bool = False


@dataclass
class Doing:
    action: Action
    ends_at: float
    fails: bool
