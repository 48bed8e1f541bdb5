"""What the journal says of a run's last attempt: its state, its servers and processes, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher.run_files.journal import Record
from launcher.run_log.line_values import as_integer, as_unix_time

SERVER_STATES = {
    "server.starting": "STARTING",
    "server.restarting": "STARTING",
    "server.ready": "READY",
    "server.died": "DEAD",
    "server.abandoned": "ABANDONED",
    "server.leaving": "LEAVING",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """`state`: READY, STARTING, DEAD, ABANDONED or LEAVING."""

    state: str
    pid: int | None = None


@dataclass(slots=True, kw_only=True)
class LastAttempt:
    """`take` is given its events in turn. Times are unix seconds, 0 where they are not known."""

    number: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0  # the time of its last event
    state: str = ""  # as it was before it ended
    state_reason: str = ""
    held: str = ""  # by whom and why a pause was asked for that holds
    waits: dict[str, tuple[float, str]] = field(default_factory=dict)  # for what the trainer waits, by who said it
    restored_step: int | None = None  # of the last restore from an onset
    servers: dict[str, ServerRecord] = field(default_factory=dict)
    open_incidents: dict[int, Record] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)  # of all its processes
    deaths: int = 0  # how many of them died
    ran_out: list[str] = field(default_factory=list)  # what ran out of memory

    def take_event(self, event: Record) -> None:
        name, subject, reason = str(event.get("event")), str(event.get("subject")), str(event.get("reason") or "")
        pid, number = as_integer(event.get("pid")), as_integer(event.get("incident"))
        self.ended_at = max(self.ended_at, as_unix_time(event.get("time")))
        self.deaths += name in ("server.died", "trainer.died")
        if pid is not None:
            self.pids.add(pid)
        match name:
            case "run.started":
                self.started_at = as_unix_time(event.get("time"))
                self.state = "INITIALIZING"
                self.state_reason = reason
            case "run.hold_asked" | "run.hold_released":
                self.held = reason if name == "run.hold_asked" else ""
            case "gate.waiting":
                self.waits["gate"] = as_unix_time(event.get("time")), f"the trainer waits at the gate: {reason}"
            case "step.late":
                self.waits["step"] = as_unix_time(event.get("time")), reason
            case "gate.answered" | "step.came":
                self.waits.pop(name.partition(".")[0], None)
            case "trainer.died":  # nobody is left to say that it is over
                self.waits.clear()
            case "server.ready":
                self.servers[subject] = ServerRecord(state=SERVER_STATES[name], pid=pid)
            case "server.left":  # as requested: it is not missing
                self.servers.pop(subject, None)
            case "server.leaving" if subject not in self.servers:
                pass
            case _ if name in SERVER_STATES:
                self.servers[subject] = ServerRecord(state=SERVER_STATES[name])
            case "incident.began" if number is not None:
                self.open_incidents[number] = event
            case "incident.ended" if number is not None:
                self.open_incidents.pop(number, None)
            case "repair.begun" if as_integer(event.get("onset_step")) is not None:
                self.restored_step = as_integer(event.get("restored_step"))
            case "memory.ran_out":
                self.ran_out.append(f"{subject} ({event.get('ran_out')})")
        if name.startswith("run.") and isinstance(state := event.get("state"), str):
            self.state = state
            self.state_reason = reason
