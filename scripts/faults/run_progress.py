"""Progress of a live run, from its ledger and events: the last committed step, and which roles are recovering."""

from __future__ import annotations

from actors.processes.process_tree import started_at
from launcher.run_files.journal import LineTail
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import RunLogFiles
from scripts.run_processes import RunProcesses


class LiveProgress:
    """What a run has written so far, brought up to date by `refresh`. `committed_at` is unix seconds."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._ledger = LineTail(paths.ledger)
        self._run = RunLogFiles(paths)
        self.step: int | None = None
        self.steps = 0
        self.committed_at = 0.0

    def refresh(self) -> None:
        for line in self._ledger.read():
            if isinstance(step := line.get("global_step"), int):
                self.step = step
                self.steps += 1
                self.committed_at = self._paths.ledger.stat().st_mtime
        self._run.refresh()

    def is_ready(self, server: str, pid: int) -> bool:
        """The run has said that this incarnation of the server is READY."""
        known = self._run.log.last_attempt.servers.get(server)
        return known is not None and (known.state, known.pid) == ("READY", pid)

    def recovering(self, role: str, found: RunProcesses, *, since: float) -> str:
        """Why `role` must be left alone: it is absent, or has not shown itself healthy since `since` (unix seconds).

        The evidence is a step: one committed after the last fault, and after the trainer's process began. A server
        needs no step of its own, since others may serve meanwhile; it must have been reported READY.
        """
        if self.step is None:
            return "the run has not committed a step yet"
        if self.committed_at <= since:
            return "no step was committed since the last fault"
        match role:
            case "trainer" if found.trainer is None:
                return "the trainer has no process now"
            case "trainer" if found.trainer and self.committed_at <= started_at(found.trainer):
                return f"the trainer (pid {found.trainer.pid}) has not committed a step yet"
            case "server" if not self.ready_servers(found):
                return "no server is READY now"
            case "supervisor" if not found.supervisors:
                return "neither health_monitor nor coordinator has a process now"
        return ""

    def ready_servers(self, found: RunProcesses) -> list[int]:
        """Indices of the servers that are alive and were reported READY in this incarnation."""
        return [server.index for server in found.servers if self.is_ready(server.name, server.http.pid)]
