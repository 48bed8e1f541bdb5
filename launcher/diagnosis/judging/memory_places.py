"""Whose memory ran out, and in which phase, by one line of a log."""

from __future__ import annotations

from launcher.diagnosis.reading.log_records import Kind, LogEvent, Role
from launcher.policy.exit_cause import RanOut, find_server_cause, find_trainer_cause


def place_of(event: LogEvent) -> tuple[str, str]:
    """(server or trainer, phase) of a line that reports that memory ran out; of a kill ("", "host") where the kernel's
    name for the process does not say which it was."""
    if event.kind is Kind.KILLED_FOR_MEMORY:
        return "" if event.role in (Role.UNKNOWN, Role.KERNEL) else str(event.role), "host"
    ran_out = str(event.facts.get("ran_out") or ran_out_of(event) or "")
    phases = {RanOut.SERVER_POOL_TOO_SMALL: "startup", RanOut.SERVER_POOL: "generation"}
    phase = next((phase for kind, phase in phases.items() if ran_out == kind), str(event.facts.get("phase") or ""))
    return "server" if ran_out.startswith("server") else "trainer", phase


def ran_out_of(event: LogEvent) -> RanOut | None:
    """Which memory it was, by the patterns of exit_cause.py."""
    if event.kind is Kind.KILLED_FOR_MEMORY:
        return {Role.SERVER: RanOut.SERVER_HOST, Role.TRAINER: RanOut.TRAINER_HOST}.get(event.role)
    line = str(event.facts.get("line") or event.text)
    known = event.facts.get("ran_out")
    if known in set(RanOut):
        return RanOut(str(known))
    find = find_server_cause if event.role is Role.SERVER else find_trainer_cause
    return find([line], None).ran_out or find_server_cause([line], None).ran_out
