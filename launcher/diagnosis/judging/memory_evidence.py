"""Evidence for and against memory that ran out, and for a trainer that failed by itself."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.diagnosis.judging.evidence import Evidence, line_of, own_incidents, seen_in
from launcher.diagnosis.judging.incident_context import IncidentContext
from launcher.diagnosis.reading.log_patterns import place_of
from launcher.diagnosis.reading.log_records import Kind, LogEvent, Role


def of_memory(context: IncidentContext) -> Iterator[Evidence]:
    yield from own_incidents(context, "server_oom", "trainer_oom")
    ran_out, killed = context.near(Kind.OUT_OF_MEMORY), context.near(Kind.KILLED_FOR_MEMORY)
    if ran_out:
        yield seen_in(ran_out, 6, f"{where_memory_ran_out(context)}: {line_of(ran_out[0])}")
    if killed:
        weight = 2 if ran_out else 6 if killed[0].role in (Role.SERVER, Role.TRAINER) else 5
        yield seen_in(killed, weight, f"the kernel killed {_killed_process(killed[0])}: {line_of(killed[0])}")
    if others := context.near(Kind.OTHER_KILLED):
        yield seen_in(others, 1, f"the kernel killed another program for memory: {line_of(others[0])}")
    if context.unplaced(Kind.OUT_OF_MEMORY, Kind.KILLED_FOR_MEMORY):
        return
    if not ran_out and not killed and any(source.what == "log" for source in context.contents.sources):
        yield Evidence(-3, "no log mentions it around the onset")


def _killed_process(event: LogEvent) -> str:
    """`sglang::schedul (pid 4242)`"""
    name, pid = str(event.facts.get("process") or "a process"), event.facts.get("pid")
    whose = "" if event.role is Role.UNKNOWN else f", of the {event.role}"
    return f"{name}{'' if pid is None else f' (pid {pid})'}{whose}"


def where_memory_ran_out(context: IncidentContext) -> str:
    """`server, at start-up`; "" where it did not."""
    if ran_out := context.near(Kind.OUT_OF_MEMORY):
        who, phase = place_of(ran_out[0])
        return {"": who, "startup": f"{who}, at start-up"}.get(phase, f"{who}, in {phase}")
    killed = context.near(Kind.KILLED_FOR_MEMORY)
    return f"the kernel killed {_killed_process(killed[0])}" if killed else ""


def of_trainer_crash(context: IncidentContext) -> Iterator[Evidence]:
    yield from own_incidents(context, "trainer_crash", "trainer_hang")
    failed, killed = context.near(Kind.TRAINER_FAILED), context.near(Kind.KILLED)
    if failed:
        yield seen_in(failed, 3, f"the trainer failed: {line_of(failed[0])}")
    elif killed:
        yield seen_in(killed, 3, f"a process was ended by SIGKILL: {line_of(killed[0])}")
    if (failed or killed) and context.near(Kind.OUT_OF_MEMORY, Kind.KILLED_FOR_MEMORY, role=Role.TRAINER):
        yield Evidence(-2, "it ran out of memory first")
