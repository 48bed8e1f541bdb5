"""Names the events of the Coordinator's actions, and reads facts of events in the types that they had when written."""

from __future__ import annotations

from collections.abc import Mapping

from actors.supervision.fleet_record import LEFT
from launcher.base.messages import Cause
from launcher.policy.actions import (
    AbandonServer,
    Action,
    AdmitServer,
    CondemnCheckpoints,
    Halt,
    LeaveServer,
    LoadWeights,
    ParkTrainer,
    PauseTrainer,
    ReinstateCheckpoints,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
    UnparkTrainer,
)
from launcher.policy.exit_cause import RanOut
from launcher.policy.memory_backoff import MemorySettings, TriedSettings
from launcher.policy.restart_budget import RepairAttempt, Rung

EVENTS: Mapping[type[Action], tuple[str, str]] = {
    PauseTrainer: ("trainer.pausing", "trainer.paused"),
    ResumeTrainer: ("trainer.resuming", "trainer.resumed"),
    RestartTrainer: ("trainer.restarting", "trainer.restarted"),
    ParkTrainer: ("trainer.parking", "trainer.parked"),
    UnparkTrainer: ("trainer.unparking", "trainer.unparked"),
    RestoreTrainer: ("trainer.restoring", "trainer.loaded"),
    CondemnCheckpoints: ("checkpoint.condemning", "checkpoint.condemned"),
    ReinstateCheckpoints: ("checkpoint.reinstating", "checkpoint.reinstated"),
    RestartServer: ("server.restarting", "server.restarted"),
    AbandonServer: ("server.abandoning", "server.abandoned"),
    LoadWeights: ("server.loading", "server.loaded"),
    AdmitServer: ("server.probing", "server.ready"),
    LeaveServer: ("server.leaving", LEFT),
    Halt: ("run.halting", "run.halted"),
}
"""The event that records that an action was begun, and the one that records that it was done."""


def attempt_of(event: Mapping[str, object]) -> RepairAttempt:
    return RepairAttempt(
        at=number_of(event, "at"),
        cause=Cause(str(event["cause"])),
        subject=str(event["subject"]),
        rung=Rung(str(event["rung"])),
        onset_step=optional_number(event, "onset_step"),
        restored_step=optional_number(event, "restored_step"),
        told=str(event.get("told") or ""),
    )


def tried_of(event: Mapping[str, object]) -> TriedSettings:
    settings = event["settings"]
    assert isinstance(settings, Mapping)
    return TriedSettings(ran_out=RanOut(str(event["ran_out"])), settings=MemorySettings(**settings))


def list_of(event: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    value = event.get(key)
    return value if isinstance(value, list) else []


def number_of(event: Mapping[str, object], key: str) -> float:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def numbers_of(event: Mapping[str, object], key: str) -> frozenset[float]:
    value = event.get(key)
    listed = value if isinstance(value, list | tuple) else ()
    return frozenset(float(one) for one in listed if isinstance(one, int | float))


def optional_number(event: Mapping[str, object], key: str) -> int | None:
    value = event.get(key)
    return value if isinstance(value, int) else None
