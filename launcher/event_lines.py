"""What a person is told of the journal: one line for each event that says what happened and what is being done.

[ 83.2 s] server-1 died: ended by SIGKILL (exit code -9)
[ 83.3 s] server-1 is being restarted: server_crash of server-1: server, 1 of 3
[ 86.0 s] server-1 READY, weight_version 41, 2.8 s after it died
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

Event = Mapping[str, object]

TOLD: Mapping[str, Callable[[Event], str]] = {
    "trainer.started": lambda e: (
        f"trainer ready: {e.get('prompts')} prompts, {e.get('held_out')} held out, {e.get('total_steps')} steps in all"
    ),
    "trainer.restored": lambda e: f"trainer restored {e.get('reason')}; step {_next(e)} is next",
    "trainer.died": lambda e: f"the trainer died: {e.get('reason')}",
    "trainer.restarting": lambda e: f"the trainer is being restarted: {e.get('reason')}",
    "trainer.pausing": lambda e: f"the trainer is being paused: {e.get('reason')}",
    "server.died": lambda e: f"{e.get('subject')} died: {e.get('reason')}",
    "server.restarting": lambda e: f"{e.get('subject')} is being restarted: {e.get('reason')}",
    "server.abandoned": lambda e: f"{e.get('subject')} is given up; the run goes on without it: {e.get('reason')}",
    "server.ready": lambda e: f"{e.get('subject')} READY, weight_version {e.get('weight_version')}" + _recovered(e),
    "batch.rejected": lambda e: f"a batch was rejected before step {e.get('global_step')}: {e.get('reason')}",
    "gate.waiting": lambda e: f"the trainer waits at the gate: {e.get('reason')}",
    "gate.answered": lambda e: "the gate answers again",
    "checkpoint.condemned": lambda e: f"checkpoints condemned: {e.get('checkpoints')}",
    "checkpoint.failed": lambda e: f"no checkpoint was saved: {e.get('reason')}",
    "state.no_room": lambda e: str(e.get("reason")),
    "state.failed": lambda e: str(e.get("reason")),
    "state.damaged": lambda e: f"an older state is used: {e.get('reason')}",
    "coordinator.adopted": lambda e: f"the Coordinator was restarted, and goes on with {e.get('reason')}",
    "memory.ran_out": lambda e: f"{e.get('subject')} ran out of memory ({e.get('ran_out')}): {e.get('reason')}",
    "memory.remembered": lambda e: f"memory ran out here before, so this attempt begins with {e.get('reason')}",
    "memory.book_damaged": lambda e: f"what this host had learnt about memory is lost: {e.get('reason')}",
    "memory.not_kept": lambda e: f"the next attempt will not know this: {e.get('reason')}",
    "memory.rising": lambda e: f"{e.get('subject')}: {e.get('reason')}",
    "run.halting": lambda e: f"the run is being ended, {e.get('word')}: {e.get('reason')}",
}


class EventTail:
    """Reads what others append to events.jsonl, from where it is now. A line that is not whole yet waits."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path = path
        self._attempt = attempt
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        """In words, the events of this attempt since the last call that a person wants to hear of."""
        told = [tell(event) for event in self._new_events() if event.get("attempt") == self._attempt]
        return [line for line in told if line]

    def _new_events(self) -> list[Event]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not there yet
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [event for event in map(_parse, whole) if event is not None]


def tell(event: Event) -> str:
    """The event in words; "" where nobody needs to hear of it."""
    words = TOLD.get(str(event.get("event")))
    return "" if words is None else " ".join(words(event).split())


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:  # torn by a crash
        return None
    return event if isinstance(event, dict) else None


def _next(event: Event) -> int:
    step = event.get("global_step")
    return step + 1 if isinstance(step, int) else 0


def _recovered(event: Event) -> str:
    seconds = event.get("recovered_after_s")
    return f", {seconds:.1f} s after it died" if isinstance(seconds, float) else ""
