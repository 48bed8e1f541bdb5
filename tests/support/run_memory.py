"""What a Coordinator remembers of a run, beside the journal of a test."""

from actors.supervision.run_history import RunHistory
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_memory import MemoryFile, RunMemory
from launcher.run_log.run_log import RunLog


def history_of(events, attempt=1, *, journal=None, node="n"):
    """Of a Coordinator that begins, or takes over where memory.json is there already."""
    file = MemoryFile(events.with_name("memory.json"), node)
    if (known := file.last()) is not None and known.attempt < attempt:
        log = RunLog()
        for line in read_lines(events):
            log.take_event(line)
        file.begin(attempt, last_incident=log.last_incident, of_a_command=())
    memory = file.read(attempt) if file.path.exists() else RunMemory(attempt=attempt)
    if memory.command_events is None:
        memory.command_events = []
    return RunHistory(journal or Journal(events, attempt), memory, file)
