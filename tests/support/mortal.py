"""A process that is killed at a chosen moment: what it was to write later is not written."""

from collections import Counter

from launcher.run_files.journal import Journal
from launcher.run_files.run_memory import MemoryFile


class Death:
    """Comes once, at the `number`-th of its moments; `seen` counts those of every kind."""

    def __init__(self, moment=None, number=0):
        self.moment = moment
        self.number = number
        self.seen = Counter()
        self.has_come = False

    def comes(self, moment):
        self.seen[moment] += 1
        is_it = not self.has_come and (moment, self.seen[moment]) == (self.moment, self.number)
        self.has_come |= is_it
        return is_it


class MortalFile(MemoryFile):
    """`is_killed`: whether the process is dead at a moment that it reaches."""

    def __init__(self, path, node, is_killed):
        super().__init__(path, node)
        self._is_killed = is_killed

    def _replace(self, content):
        if not self._is_killed("before a save"):
            super()._replace(content)
            self._is_killed("after a save")


class MortalJournal(Journal):
    """`is_dead`: whether the process is."""

    def __init__(self, path, attempt, clock, is_dead):
        super().__init__(path, attempt, clock)
        add = self._lines.add
        self._lines.add = lambda line: None if is_dead() else add(line)
