"""Events of the journal as lines for people: one when an incident begins, with the repair under way, one when it ends.

[ 83.2 s] incident 1: server-1 crashed (ended by SIGKILL); it is being restarted
[ 86.0 s] incident 1 is over after 2.8 s: server-1 serves again
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.base.wording import in_one_line
from launcher.policy.canary_policy import LAST_ATTEMPT_BROKE
from launcher.run_files.journal import LineTail, Record
from launcher.run_log.line_values import without_endless_integers

LONGEST_REASON = 160
MOST_SEEN = 500
"""More than a writer keeps unwritten, and than is written between two looks."""

INCIDENT_TITLES: Mapping[str, str] = {
    "server_crash": "{subject} crashed",
    "server_hang": "{subject} hangs",
    "server_oom": "{subject} ran out of memory",
    "server_stale": "{subject} holds old weights",
    "server_corrupt": "{subject} holds damaged weights",
    "server_slow": "{subject} is slow",
    "gpu_fault": "{subject} met a fault of its GPU",
    "trainer_crash": "the trainer crashed",
    "trainer_hang": "the trainer hangs",
    "trainer_oom": "the trainer ran out of memory",
    "nonfinite": "numbers that are not finite",
    "reward_collapse": "the rewards or the completions changed",
    "verifier_broken": "the reward function is broken",
    "checkpoint_corrupt": "{subject} is damaged",
    "disk_full": "a disk can't be written",
    "node_lost": "{subject} was lost with its node",
    "outside_weights": "rewards fell for a reason outside the weights",
    "cluster_lost": "the run's Ray cluster was lost",
    "driver_lost": "the run's driver was killed",
    "run_halted": "the run halted",
}


IN_AN_INCIDENT = frozenset({"server.probing_failed", "server.restarting", "server.ready", "node.lost"})
"""What belongs to an incident is reported by its two lines."""

TOLD: Mapping[str, str | Callable[[Record], str]] = {
    "incident.began": lambda e: f"incident {e.get('incident')}: {what_happened(e)}; {e.get('doing')}",
    "incident.ended": lambda e: _ended(e),
    "trainer.started": "trainer ready: {prompts} prompts, {held_out} held out, {total_steps} steps in all",
    "trainer.restored": lambda e: f"trainer {_restored(e)}; step {_next(e)} is next",
    "trainer.loaded": lambda e: _probation(e),
    "trainer.unwatched": "the trainer: {short_reason}",
    "server.probing_failed": "{subject} gets no traffic: {short_reason}",
    "server.restarting_failed": "{subject} could not be restarted: {short_reason}",
    "trainer.restarting_failed": "the trainer could not be restarted: {short_reason}",
    "trainer.restoring_failed": "the trainer could not be restored: {short_reason}",
    "server.restarting": "{subject} is being restarted: {short_reason}",
    "server.abandoned": "{subject} is given up; the run continues without it: {short_reason}",
    "server.ready": "{subject} READY, weight_version {weight_version}",
    "fleet.resized": "there are to be {servers} servers: {short_reason}",
    "server.left": "{subject} has left; {moved} of its requests moved",
    "step.late": "{short_reason}",
    "step.came": "{short_reason}",
    "weights.by_files": "weights go through files for a while: {short_reason}",
    "weights.fast_again": "weights go as actor.weight_update_mode says again",
    "run.hold_asked": "the run is being paused: {short_reason}",
    "run.hold_released": "the run resumes",
    "node.lost": lambda e: f"node {e.get('subject')} was lost, and with it {_held(e)}",
    "fleet.shrunk": "{short_reason}",
    "fleet.grown": "{short_reason}",
    "gate.waiting": "the trainer waits at the gate: {short_reason}",
    "gate.answered": "the gate answers again",
    "gate.drift": "{reason}",
    "gate.drift_over": "log-probs of the servers are as near as at first again",
    "checkpoint.condemned": lambda e: (
        f"checkpoints condemned: {_names(e['checkpoints'])}" if e.get("checkpoints") else ""
    ),
    "checkpoint.reinstated": lambda e: (
        f"checkpoints put back: {_names(e['checkpoints'])}" if e.get("checkpoints") else ""
    ),
    "checkpoint.upload_failed": "{subject} is not copied yet: {short_reason}",
    "checkpoint.failed": "no checkpoint was saved: {short_reason}",
    "state.no_room": "{short_reason}",
    "state.failed": "{short_reason}",
    "state.damaged": "an older state is used: {short_reason}",
    "trainer.snapshot_failed": "the display is out of date: {reason} (this is a defect)",
    "coordinator.adopted": "the Coordinator was restarted, and continues with {reason}",
    "memory.ran_out": "{subject} ran out of memory ({ran_out}): {reason}",
    "memory.remembered": "memory ran out here before, so this attempt begins with {reason}",
    "memory.book_damaged": "the record of this host's memory settings is lost: {reason}",
    "memory.not_kept": "the next attempt will not know this: {reason}",
    "reward.alert": "the rewards: {short_reason}",
    "reward.no_score": "{reason}",
    "reward.rebased": "{reason}",
    "rollouts.cut": "{reason}",
    "reward.alert_over": "the rewards are no longer only zeros",
    "memory.rising": "{subject}: {reason}",
    "memory.compared": "{subject}: {reason}",
    "memory.off_plan": "{subject}: {reason}",
    "run.deadline": "stopping: {reason}; the step under way is finished if it is being trained, and saved",
    "notice.unreadable": "{reason}",
    "run.halting": "the run is being ended, {word}: {reason}",
}
"""Templates of the event's own facts, or how its line is made of them."""


class EventTail:
    """The lines that others append to events.jsonl from now on."""

    def __init__(self, path: Path, attempt: int | None = None) -> None:
        """`attempt` None: those of every attempt."""
        self._tail = LineTail(path, since=path.stat().st_size if path.exists() else 0)
        self._attempt = attempt
        self._seen: deque[tuple[object, ...]] = deque(maxlen=MOST_SEEN)

    def new_events(self, unwritten: Sequence[Record] = ()) -> list[Record]:
        """Those of this attempt since the last call. `unwritten`: those that a disk has not taken yet; each is returned
        once, also when it is in the file later."""
        found = []
        for event in (*self._tail.read(), *unwritten):
            key = tuple(event.get(name) for name in ("monotonic", "event", "subject"))
            if self._attempt not in (None, event.get("attempt")) or (key[0] is not None and key in self._seen):
                continue
            self._seen.append(key)
            found.append(event)
        return found


def tell(event: Record) -> str:
    """The event as text; "" where it needs no line."""
    name = str(event.get("event"))
    told = TOLD.get(name, "")
    if name in IN_AN_INCIDENT and event.get("incident") is not None:
        return ""
    event = without_endless_integers(event)
    facts = defaultdict(lambda: None, event, short_reason=_reason(event))
    return " ".join((told.format_map(facts) if isinstance(told, str) else told(event)).split())


def alert_of(event: Record) -> tuple[str, str] | None:
    """Title and text of the message to a person who does not watch the console; None where it needs none."""
    match event.get("event"):
        case "incident.began" | "incident.ended":
            return f"{event.get('cause')}: {event.get('subject')}", tell(event)
        case "step.late" | "step.came":
            return "no step", tell(event)
    return None


def what_happened(event: Record) -> str:
    """Of an incident that begins: what, and in brackets how it showed."""
    if event.get("reason") == LAST_ATTEMPT_BROKE:
        return LAST_ATTEMPT_BROKE  # of the past: whether it is broken now is not known yet
    subject = str(event.get("subject"))
    what = incident_title(str(event.get("cause")), subject)
    onset = event.get("onset_step")
    at = f" at about step {onset}" if isinstance(onset, int) and subject in ("policy", "reward") else ""
    reason = _reason(event)
    return f"{what}{at} ({reason})" if reason else f"{what}{at}"


def incident_title(cause: str, subject: str) -> str:
    """`server-0 crashed`. Whose failure spoilt a batch is not known where no server is its subject."""
    if subject == "batch":
        return "a batch was rejected"
    return INCIDENT_TITLES.get(cause, "{subject} failed").replace("{subject}", subject)


def _ended(event: Record) -> str:
    seconds = event.get("seconds")
    after = f" after {seconds:.1f} s" if isinstance(seconds, int | float) else ""
    subject, reason = str(event.get("subject")), str(event.get("reason"))
    how = reason.replace("it ", f"{subject} ", 1) if reason.startswith("it ") else reason
    word = "is over" if event.get("is_mended") else "was not repaired"
    return f"incident {event.get('incident')} {word}{after}: {how}"


def _reason(event: Record) -> str:
    return in_one_line(event.get("reason"), longest=LONGEST_REASON)


def _held(event: Record) -> str:
    return _names(event.get("held")) or "nothing of this run"


def _names(names: object) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list | tuple) else str(names)


def _probation(event: Record) -> str:
    """Of a restore from before a fall: for how long rewards are watched more closely."""
    first, steps = event.get("next_step"), event.get("probation_steps")
    if not (isinstance(first, int) and isinstance(steps, int) and steps):
        return ""
    return f"steps {first} to {first + steps - 1} are on probation: a fall of the rewards is found sooner"


def _restored(event: Record) -> str:
    """A run that begins restores nothing."""
    reason = str(event.get("reason"))
    return "begins with the first weights" if reason == "to the first weights" else f"restored {reason}"


def _next(event: Record) -> int:
    step = event.get("global_step")
    return step + 1 if isinstance(step, int) else 0
