"""Looks at a run, made by hand: what is well by default, and what is not where it is said."""

import dataclasses

from launcher.base.messages import (
    Cause,
    Health,
    Incident,
    ServerState,
    Verdict,
)
from launcher.config.schema import RunConfig
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus
from launcher.policy.memory_backoff import MemorySettings
from launcher.policy.observed import Observed, RunState, ServerFacts, TrainerFacts
from launcher.policy.plan import plan
from launcher.policy.restart_budget import RepairAttempt, Rung

CONFIG = RunConfig()
NOW = 1000.0
VERSION = 41

ALIVE = Verdict(health=Health.HEALTHY, reason="made a token 0.1 s ago")
UNKNOWN = Verdict(health=Health.UNKNOWN, reason="never looked at")
SUSPECT = Verdict(health=Health.SUSPECT, reason="http stopped for 3.0 s")
CRASHED = Verdict(health=Health.DEAD, reason="exited with -9", cause=Cause.SERVER_CRASH)
OUT_OF_MEMORY = Verdict(health=Health.DEAD, reason="out of device memory", cause=Cause.SERVER_OOM)
T_CRASHED = Verdict(health=Health.DEAD, reason="exited with 1", cause=Cause.TRAINER_CRASH)
T_OUT_OF_MEMORY = Verdict(health=Health.DEAD, reason="out of device memory", cause=Cause.TRAINER_OOM)
CORRUPT = Verdict(health=Health.SUSPECT, reason="log-probs differ", cause=Cause.SERVER_CORRUPT)


def server(number=0, state=ServerState.READY, verdict=ALIVE, **kwargs):
    held = {"weight_version": VERSION, "lineage": 0} | kwargs
    return ServerFacts(name=f"s{number}", state=state, verdict=verdict, **held)


def fresh(number=0, state=ServerState.STALE):
    return server(number, state=state, weight_version=None, lineage=None)


def dead(number=0, verdict=CRASHED, **kwargs):
    return server(number, ServerState.DEAD, verdict, weight_version=None, lineage=None, **kwargs)


TRAINER = TrainerFacts(
    verdict=ALIVE, is_loaded=True, is_paused=False, policy_version=VERSION, lineage=0, next_step=VERSION
)


def trainer(**changes):
    return dataclasses.replace(TRAINER, **changes)


PAUSED = trainer(is_paused=True)
SHELF = tuple(
    CheckpointFacts(global_step=step, status=status)
    for step, status in ((9, CheckpointStatus.GOOD), (19, CheckpointStatus.GOOD), (39, CheckpointStatus.CANDIDATE))
)
MEMORY = MemorySettings.of(CONFIG, longest_sequence=600, on_gpu=True, shares_gpu=True)
COLLAPSE = Incident(
    cause=Cause.REWARD_COLLAPSE, subject="policy", reason="mean reward fell", since=990.0, onset_step=35
)
BROKEN = Incident(
    cause=Cause.VERIFIER_BROKEN, subject="reward", reason="42 was scored 0", since=990.0, onset_step=VERSION
)


def observed(*servers, state=RunState.RUNNING, trainer=TRAINER, **kwargs):
    return Observed(
        state=state, servers=servers or (server(),), trainer=trainer, checkpoints=SHELF, memory=MEMORY, **kwargs
    )


def attempts(*rungs, cause=Cause.SERVER_CRASH, subject="s0"):
    return [RepairAttempt(at=800.0 + 10 * n, cause=cause, subject=subject, rung=rung) for n, rung in enumerate(rungs)]


SPENT = [Rung.SERVER] * CONFIG.restart.server
BOTH_SPENT = attempts(*SPENT) + attempts(*SPENT, subject="s1")


def kinds(made):
    return [type(action) for action in made.actions]


def decide(seen, history=(), now=NOW, config=CONFIG):
    made = plan(seen, history, config, now)
    assert plan(seen, history, config, now) == made
    return made
