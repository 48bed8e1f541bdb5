"""What a Coordinator remembers of a run, beside the journal of a test."""

from actors.supervision.run_history import RunHistory
from launcher.run_files.journal import Journal
from launcher.run_files.run_memory import MemoryFile, RunMemory


def history_of(events, attempt=1, *, journal=None, node="n"):
    """Of a Coordinator that begins, or takes over where memory.json is there already."""
    file = MemoryFile(events.with_name("memory.json"), node)
    if (known := file.last()) is not None and known.attempt < attempt:
        file.begin(attempt, events, has_command=True)
    memory = file.read(attempt) if file.path.exists() else RunMemory(attempt=attempt)
    if memory.command_events is None:
        memory.command_events = []
    return RunHistory(journal or Journal(events, attempt), memory, file)
