"""Checks of a cluster that others started: nobody else runs this trial, every node sees its files, its head answers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from actors.cluster.node_identity import OF_RAY, alive_nodes
from actors.cluster.node_readiness import check_nodes
from actors.cluster.shared_path_check import check_shared_path
from launcher.base.errors import StorageError
from launcher.config.schema import RunConfig
from launcher.run_files.run_paths import RunPaths

FREE_S = 60.0
"""For actors of an attempt whose driver has just died to end: a node must first be declared lost."""
LOOK_S = 0.5
SAY_S = 1.25
SILENT_S = 45.0
"""Without an answer of the cluster's head the run ends with that reason: at 60 s Ray would end every process."""
LONGEST_TURN_S = 5.0
"""What one turn of the driver counts at most of a silence: a longer one was a pause of its own."""
SEVERAL = (
    "the nodes are several machines: weights on their way to the servers, and the state after each step, "
    "are kept below cluster.fileroot and not in memory"
)


def make_ready(
    config: RunConfig,
    paths: RunPaths,
    say: Callable[[str], None],
    *,
    besides: str,
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Check the cluster before anything is started. Raises UsageError, and KeyboardInterrupt where `is_stopped` is true
    while it waits. `besides`: an actor that may exist already."""
    wait_for_free_names(paths, besides=besides, is_stopped=is_stopped)
    check_nodes(config)
    nodes = alive_nodes()
    shares_memory = check_shared_path(paths)
    say(f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} of the cluster see {paths.fileroot}")
    if not shares_memory and not paths.several_machines.exists():
        paths.several_machines.touch()
        say(SEVERAL)


def wait_for_free_names(paths: RunPaths, *, besides: str, is_stopped: Callable[[], bool] = lambda: False) -> None:
    """Raises StorageError where actors of the same run are on this cluster: another driver runs it; KeyboardInterrupt
    where `is_stopped` is true before."""
    give_up_at = time.monotonic() + FREE_S
    while taken := names_in(paths.namespace) - {besides}:
        if is_stopped():
            raise KeyboardInterrupt
        if time.monotonic() > give_up_at:
            raise StorageError(
                f"{paths.experiment_name}/{paths.trial_name} is already running on this cluster: "
                f"{', '.join(sorted(taken))} in {paths.namespace}",
                "wait for it or end it (scripts/run_control.py stop), or give this run another trial_name",
            )
        time.sleep(1.0)


def names_in(namespace: str) -> set[str]:
    named = OF_RAY.util.list_named_actors(all_namespaces=True)
    return {str(one["name"]) for one in named if one["namespace"] == namespace}


class HeadWatch:
    """Asks the cluster's head for its nodes, on a separate thread, since an answer may never come."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_s = 0.0
        self._turned_at = clock()
        self._alive: dict[str, str] = {}
        self._lost: dict[str, tuple[str, float]] = {}
        threading.Thread(target=self._go_on, name="head", daemon=True).start()

    def lost(self) -> str:
        """Why the cluster counts as lost; "" where its head answers. To be asked again and again."""
        now = self._clock()
        self._silent_s += min(now - self._turned_at, LONGEST_TURN_S)
        self._turned_at = now
        silent_s = self._silent_s
        return f"the cluster's head has not answered for {silent_s:.0f} s" if silent_s > SILENT_S else ""

    def lost_nodes(self) -> dict[str, str]:
        """Addresses by id of nodes lost for so long that a running Coordinator would have reported it."""
        now = self._clock()
        return {node: address for node, (address, at) in list(self._lost.items()) if now - at > SAY_S}

    def _go_on(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # Ray's own errors are many, and bare
                alive = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in alive_nodes()}
                self._silent_s = 0.0
                now = self._clock()
                self._lost |= {node: (address, now) for node, address in self._alive.items() if node not in alive}
                self._alive = alive
            time.sleep(LOOK_S)
