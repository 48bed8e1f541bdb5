"""Events of the journal as lines for people: one when an incident begins, with the repair under way, one when it ends.

[ 83.2 s] incident 1: server-1 crashed (ended by SIGKILL); it is being restarted
[ 86.0 s] incident 1 is over after 2.8 s: server-1 serves again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.base.wording import in_one_line
from launcher.run_files.line_tail import LineTail

Event = Mapping[str, object]

LONGEST_REASON = 160

INCIDENT_TITLES: Mapping[str, str] = {
    "server_crash": "{subject} crashed",
    "server_hang": "{subject} hangs",
    "server_oom": "{subject} ran out of memory",
    "server_stale": "{subject} holds old weights",
    "server_corrupt": "{subject} holds damaged weights",
    "server_slow": "{subject} is slow",
    "trainer_crash": "the trainer crashed",
    "trainer_hang": "the trainer hangs",
    "trainer_oom": "the trainer ran out of memory",
    "nonfinite": "numbers that are not finite",
    "reward_collapse": "the rewards fell or jumped",
    "verifier_broken": "the reward function is broken",
    "checkpoint_corrupt": "{subject} is damaged",
    "node_lost": "{subject} was lost with its node",
}


def _unless_of_an_incident(words: Callable[[Event], str]) -> Callable[[Event], str]:
    """What belongs to an incident is reported by its two lines."""
    return lambda event: "" if event.get("incident") is not None else words(event)


TOLD: Mapping[str, Callable[[Event], str]] = {
    "incident.began": lambda e: f"incident {e.get('incident')}: {what_happened(e)}; {e.get('doing')}",
    "incident.ended": lambda e: _ended(e),
    "trainer.started": lambda e: (
        f"trainer ready: {e.get('prompts')} prompts, {e.get('held_out')} held out, {e.get('total_steps')} steps in all"
    ),
    "trainer.restored": lambda e: f"trainer restored {e.get('reason')}; step {_next(e)} is next",
    "trainer.pausing": _unless_of_an_incident(lambda e: f"the trainer is being paused: {_reason(e)}"),
    "server.restarting_failed": lambda e: f"{e.get('subject')} could not be restarted: {_reason(e)}",
    "trainer.restarting_failed": lambda e: f"the trainer could not be restarted: {_reason(e)}",
    "trainer.restoring_failed": lambda e: f"the trainer could not be restored: {_reason(e)}",
    "server.restarting": _unless_of_an_incident(lambda e: f"{e.get('subject')} is being restarted: {_reason(e)}"),
    "server.abandoned": lambda e: f"{e.get('subject')} is given up; the run continues without it: {_reason(e)}",
    "server.ready": _unless_of_an_incident(
        lambda e: f"{e.get('subject')} READY, weight_version {e.get('weight_version')}"
    ),
    "server.join_asked": lambda e: f"{e.get('subject')} joins: {_reason(e)}",
    "server.leave_asked": lambda e: f"{e.get('subject')} leaves: {_reason(e)}",
    "server.left": lambda e: f"{e.get('subject')} has left; {e.get('moved')} of its requests moved",
    "server.slow": lambda e: f"{e.get('subject')} is slow: {_reason(e)}",
    "server.pace_back": lambda e: f"{e.get('subject')} is no longer slow",
    "run.hold_asked": lambda e: f"the run is being paused: {_reason(e)}",
    "run.hold_released": lambda e: "the run resumes",
    "node.lost": _unless_of_an_incident(lambda e: f"node {e.get('subject')} was lost, and with it {_held(e)}"),
    "fleet.shrunk": lambda e: _reason(e),
    "fleet.grown": lambda e: _reason(e),
    "gate.waiting": lambda e: f"the trainer waits at the gate: {_reason(e)}",
    "gate.answered": lambda e: "the gate answers again",
    "checkpoint.condemned": lambda e: (
        f"checkpoints condemned: {_names(e['checkpoints'])}" if e.get("checkpoints") else ""
    ),
    "checkpoint.upload_failed": lambda e: f"{e.get('subject')} is not copied yet: {_reason(e)}",
    "checkpoint.failed": lambda e: f"no checkpoint was saved: {_reason(e)}",
    "state.no_room": lambda e: _reason(e),
    "state.failed": lambda e: _reason(e),
    "state.damaged": lambda e: f"an older state is used: {_reason(e)}",
    "coordinator.adopted": lambda e: f"the Coordinator was restarted, and continues with {e.get('reason')}",
    "memory.ran_out": lambda e: f"{e.get('subject')} ran out of memory ({e.get('ran_out')}): {e.get('reason')}",
    "memory.remembered": lambda e: f"memory ran out here before, so this attempt begins with {e.get('reason')}",
    "memory.book_damaged": lambda e: f"the record of this host's memory settings is lost: {e.get('reason')}",
    "memory.not_kept": lambda e: f"the next attempt will not know this: {e.get('reason')}",
    "reward.alert": lambda e: f"the rewards: {_reason(e)}",
    "reward.alert_over": lambda e: "the rewards are no longer only zeros",
    "memory.rising": lambda e: f"{e.get('subject')}: {e.get('reason')}",
    "run.halting": lambda e: f"the run is being ended, {e.get('word')}: {e.get('reason')}",
}


class EventTail:
    """The lines that others append to events.jsonl from now on."""

    def __init__(self, path: Path, attempt: int | None = None) -> None:
        """`attempt` None: those of every attempt."""
        self._tail = LineTail(path, since=path.stat().st_size if path.exists() else 0)
        self._attempt = attempt

    def new_events(self) -> list[Event]:
        """Those of this attempt since the last call."""
        return [event for event in self._tail.read() if self._attempt in (None, event.get("attempt"))]


def tell(event: Event) -> str:
    """The event as text; "" where it needs no line."""
    words = TOLD.get(str(event.get("event")))
    return "" if words is None else " ".join(words(event).split())


def alert_of(event: Event) -> tuple[str, str] | None:
    """Title and text of the message to a person who does not watch the console; None where it needs none."""
    if event.get("event") not in ("incident.began", "incident.ended"):
        return None
    return f"{event.get('cause')}: {event.get('subject')}", tell(event)


def what_happened(event: Event) -> str:
    """Of an incident that begins: what, and in brackets how it showed."""
    subject = str(event.get("subject"))
    what = incident_title(str(event.get("cause")), subject)
    onset = event.get("onset_step")
    at = f" at about step {onset}" if isinstance(onset, int) and subject in ("policy", "reward") else ""
    reason = _reason(event)
    return f"{what}{at} ({reason})" if reason else f"{what}{at}"


def incident_title(cause: str, subject: str) -> str:
    """`server-0 crashed`."""
    return INCIDENT_TITLES.get(cause, "{subject} failed").replace("{subject}", subject)


def _ended(event: Event) -> str:
    seconds = event.get("seconds")
    after = f" after {seconds:.1f} s" if isinstance(seconds, int | float) else ""
    subject, reason = str(event.get("subject")), str(event.get("reason"))
    how = reason.replace("it ", f"{subject} ", 1) if reason.startswith("it ") else reason
    word = "is over" if event.get("is_mended") else "was not repaired"
    return f"incident {event.get('incident')} {word}{after}: {how}"


def _reason(event: Event) -> str:
    return in_one_line(event.get("reason"), longest=LONGEST_REASON)


def _held(event: Event) -> str:
    return _names(event.get("held")) or "nothing of this run"


def _names(names: object) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list | tuple) else str(names)


def _next(event: Event) -> int:
    step = event.get("global_step")
    return step + 1 if isinstance(step, int) else 0
