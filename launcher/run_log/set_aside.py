"""What restores took out of the list of checkpoints, by the names that it has below set_aside/."""

from __future__ import annotations

from launcher.run_files.journal import Record
from launcher.run_files.run_order import RESTORED, TAKEN
from launcher.run_log.line_values import as_integer


class SetAside:
    """`take` is given the run's events in turn. `names`: of the last restore from an onset, with the tries of it that
    failed: what the first has set aside, the next does not meet again. `known`: of all restores. `condemned_after`: the
    step after which the last one condemns."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.known: set[str] = set()
        self.condemned_after: int | None = None
        self._was_done = True

    def take_event(self, event: Record) -> None:
        match event.get("event"):
            case "trainer.restoring" if event.get("onset_step") is not None:
                self.names = [] if self._was_done else self.names
                self._was_done = False
            case name if name == RESTORED:
                self._was_done = True
            case "checkpoint.condemning":
                self.condemned_after = as_integer(event.get("after_step"))
            case "checkpoint.condemned":
                self._add(event.get("checkpoints"))
            case "checkpoint.setting_aside" | "checkpoint.set_aside":
                self._add([event.get("subject")])
            case name if name == TAKEN:
                self.known.update(_texts(event.get("set_aside")))

    def _add(self, names: object) -> None:
        self.names = [*dict.fromkeys([*self.names, *_texts(names)])]
        self.known.update(self.names)


def _texts(values: object) -> list[str]:
    return [one for one in values if isinstance(one, str)] if isinstance(values, list) else []
