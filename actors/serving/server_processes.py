"""A server's processes by role, from /proc, and its count of tokens, from a mapped file. No HTTP, so nothing waits.

The count is `sglang:realtime_tokens_total`, the only series of SGLang 0.5.17 that grows with each pass of the model;
`sglang:generation_tokens_total` jumps when a request ends, so a long answer would look like a hang. The scheduler keeps
it in a file (prometheus_client's multiprocess mode). Reading that takes a fraction of a millisecond; /metrics takes 10
to 300 ms of the HTTP process, and does not answer when that process hangs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

from actors.processes.process_tree import PROC, Process, cpu_seconds, descendants, identify, name, stat_fields
from launcher.policy.observation_history import STOPPED, ProcessLook

HTTP, SCHEDULER, DETOKENIZER = "http", "scheduler", "detokenizer"
TITLES = {"sglang::schedul": SCHEDULER, "sglang::detoken": DETOKENIZER}
"""Process titles as the kernel keeps them: their first 15 characters."""
TOKENS = "sglang:realtime_tokens_total"


class ServerProcesses:
    """One incarnation's process tree. Its members are searched for until all roles are found, and when one is gone."""

    def __init__(self, root: Process) -> None:
        self._root = root
        self._roles: dict[str, Process] = {}
        self._counters: tuple[Path, ...] = ()

    def is_gone(self) -> bool:
        return identify(self._root.pid) != self._root

    def look_at_processes(self) -> Mapping[str, ProcessLook]:
        """Each living process by role; a server of several GPUs has `scheduler`, `scheduler-2`, …"""
        looks = self._look_at(self._roles)
        if looks.keys() != self._roles.keys() or not {HTTP, SCHEDULER, DETOKENIZER} <= looks.keys():
            self._roles = self._find()
            self._counters = ()
            looks = self._look_at(self._roles)
        return looks

    def pids(self) -> dict[str, int]:
        return {role: process.pid for role, process in self._roles.items()}

    def tokens(self) -> int | None:
        """All tokens that this incarnation has processed; None where its files can't be read."""
        if not self._counters:
            self._counters = tuple(_counter_files(p for role, p in self._roles.items() if role.startswith(SCHEDULER)))
        try:
            return sum(map(_tokens_in, self._counters)) if self._counters else None
        except (OSError, ValueError, RuntimeError, struct.error):  # removed, or read while it was being enlarged
            self._counters = ()
            return None

    def _look_at(self, roles: Mapping[str, Process]) -> dict[str, ProcessLook]:
        looks = ((role, _look_at_process(process, role)) for role, process in roles.items())
        return {role: look for role, look in looks if look is not None}

    def _find(self) -> dict[str, Process]:
        if self.is_gone():
            return {}
        roles = {HTTP: self._root}
        for process in sorted(descendants(self._root.pid), key=lambda p: (p.started, p.pid)):
            role = TITLES.get(name(process)[:15])
            if role is not None:
                same = sum(known == role or known.startswith(f"{role}-") for known in roles)
                roles[role if same == 0 else f"{role}-{same + 1}"] = process
        return roles


def _look_at_process(process: Process, role: str) -> ProcessLook | None:
    """None where it has ended, or its pid is another's by now. Fields as in proc(5)."""
    fields = stat_fields(process.pid)
    if fields is None or fields[0] in "ZX" or int(fields[19]) != process.started:
        return None
    switches = _switches(process) if fields[0] == STOPPED else None
    return ProcessLook(state=fields[0], cpu_s=cpu_seconds(fields), switches=switches)


def _switches(process: Process) -> int | None:
    """How often its first thread has left the CPU, as each stop makes it; None where it has ended."""
    try:
        status = (PROC / str(process.pid) / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return sum(int(line.split()[1]) for line in status.splitlines() if "voluntary_ctxt_switches" in line)


def _counter_files(processes: Iterable[Process]) -> list[Path]:
    """prometheus_client's `counter_<pid>.db` of each process, found among its open files."""
    found = []
    for process in processes:
        wanted = f"counter_{process.pid}.db"
        try:
            for entry in (PROC / str(process.pid) / "fd").iterdir():
                target = entry.readlink()
                if target.name == wanted:
                    found.append(target)
                    break
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or another user's
    return found


def _tokens_in(file: Path) -> int:
    """Raises ValueError where the file has no such series: unknown is not 0."""
    values = MmapedDict.read_all_values_from_file(str(file))  # type: ignore[no-untyped-call]
    counts = [value for key, value, *_ in values if f'"{TOKENS}"' in key]
    if not counts:
        raise ValueError(f"{file} has no {TOKENS}")
    return int(sum(counts))
