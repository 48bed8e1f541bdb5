"""The trainer as a Ray actor around `Training`.

The concurrency group `train` has one thread, on which all steps run; `ctl` always answers; `mend` is for calls about
one server, which may take long. `__init__` does nothing that can fail: Ray never restarts an actor whose constructor
raised. Torch is imported in the actor's process only, so the driver, which imports this module, starts seconds sooner.

A process that Ray has restarted is empty, and reports that, until `start` and `restore` are called. `stand_by` parks an
empty one, so that its `start` takes a moment. Its further ranks are parked with it, and all anew when one of them ends.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayError, RayTaskError

from actors.cluster.fencing import bind_to_cluster, holds_lease
from actors.cluster.node_identity import this_node
from actors.model.heavy_imports import LowPriorityImport, without_collection
from actors.processes.log_drain import LogDrain
from actors.ranks.rank_controller import RankController
from launcher.base.errors import RunError, TrainerError
from launcher.base.messages import Overrides, ServerInfo, TrainerEnd, TrainerReady, TrainerView
from launcher.base.rank_location import RankLocation
from launcher.config.schema import RunConfig
from launcher.policy.admission import Admission, BatchReport
from launcher.policy.canary_policy import CanaryRound
from launcher.policy.memory_backoff import with_overrides
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths

if TYPE_CHECKING:
    from actors.training.training import Training, TrainingParts


GATE_TIMEOUT_S = 10.0
"""For one answer of the monitor; it is asked again for as long as it takes."""
MONITOR = "health_monitor"
TRAINING = "actors.training.training"
RANKS_S = 1.0
"""A parked rank that takes longer to answer when it is needed does not take over: all ranks start cold."""


@ray.remote(concurrency_groups={"train": 1, "ctl": 4, "mend": 16})  # type: ignore[call-overload]  # annotated wrongly upstream
class Trainer:
    """`start`, `restore`, `allow`, `run`; the others at any time after `start`, before it they raise TrainerError."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        attempt: int,
        *,
        has_monitor: bool = False,
        rank_options: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`rank_options`: Ray's, for each trainer rank but this one, the first."""
        bind_to_cluster(config)
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._has_monitor = has_monitor
        self._rank_options = rank_options
        self._training: Training | None = None
        self._parts: TrainingParts | None = None
        self._ranks: RankController | None = None
        self._is_parked = False
        self._is_lent = not os.environ.get("CUDA_VISIBLE_DEVICES")  # it reserves none: the other actor's are lent to it
        self._imports: LowPriorityImport | None = None
        self._busy = ""
        self._printed: LogDrain | None = None

    @ray.method(concurrency_group="train")
    def stand_by(self, overrides: Overrides, gpus: str, niceness: int, ranks: Sequence[RankLocation] = ()) -> int:
        """Import what takes long, at `niceness`, and on a CPU load what `start` with these settings would load.

        Returns its pid. `gpus`: those that the trainer has, as those of its `ranks`. Nothing is put there, nor is CUDA
        initialized. Raises TrainerError where an own rank does not start.
        """
        if self._training is not None or self._stands_by():
            return os.getpid()
        self._busy = "parking"
        try:
            self._print_to_log()
            if gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus
            config = with_overrides(self._config, overrides)
            self._start_ranks(config, niceness, [rank.gpus for rank in ranks])
            with nullcontext() if TRAINING in sys.modules else without_collection():
                if TRAINING not in sys.modules:
                    self._imports = LowPriorityImport(TRAINING, niceness)
                    self._imports.run()
                if self._ranks is not None:
                    self._ranks.prepare()
                if not gpus:
                    self._parts = self._load_ahead(config)
            self._is_parked = True
        finally:
            self._busy = ""
        return os.getpid()

    @ray.method(concurrency_group="ctl")
    def hurry(self) -> bool:
        """The trainer has ended while this one is being parked. Whether its imports have the usual priority now."""
        if self._ranks is not None:
            self._ranks.hurry()
        return self._imports is not None and self._imports.hurry()

    @ray.method(concurrency_group="train")
    def start(self, overrides: Overrides, before: Sequence[RankLocation] = (), gpus: str = "") -> TrainerReady:
        """Load everything, once in a process. `overrides`: settings that a repair has changed. `before`: the further
        ranks of the trainer that ended, which had these `gpus`: where Ray gives none, they are this one's."""
        if self._training is not None:
            return self._training.ready()
        self._busy = "starting"
        try:
            self._print_to_log()
            config = with_overrides(self._config, overrides)
            ask = ask_monitor if self._has_monitor else None
            if gpus and self._is_lent:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus
            has_changed = self._parts is not None and self._parts.config != config
            if self._ranks is None or has_changed or not self._ranks.answers(RANKS_S):
                lent = [rank.gpus for rank in before] if self._is_lent else []
                self._start_ranks(config, gpus=lent)  # which import beside this one
            if self._ranks is not None:
                self._ranks.begin(config, before)
            with nullcontext() if self._is_parked else without_collection():
                from actors.training.training import Training

                self._training = Training(
                    config, self._paths, self._attempt, ask=ask, ranks=self._ranks, parts=self._parts
                )
        except BaseException:
            if self._ranks is not None:
                self._ranks.close()  # they have met, or may have: another start needs others
            raise
        finally:
            self._busy = ""
            self._parts = None
        return self._training.ready()

    def _print_to_log(self) -> None:
        """What the user's code prints in its own processes: Ray's files go with its session. What this process prints
        stays in Ray's file: the threads that empty the pipe end with it, and the last lines of an abort are its reason.
        """
        if self._printed is None:
            from actors.reward.user_process import print_to

            self._printed = LogDrain(self._paths.trainer_log)
            with self._printed.entrance() as entrance:
                print_to(os.dup(entrance))
            self._printed.begin()

    def _stands_by(self) -> bool:
        return self._is_parked and (self._ranks is None or not self._ranks.lost)

    def _start_ranks(self, config: RunConfig, niceness: int = 0, gpus: Sequence[str] = ()) -> None:
        """In place of those that were there, and of what was loaded with them; none where this process is alone."""
        if self._ranks is not None:
            self._ranks.close()
        if config.actor.dp_size > 1:
            self._parts = None
            journal = Journal(self._paths.events, self._attempt, time.time)
            self._ranks = RankController(config, self._paths, journal, self._rank_options, niceness=niceness, gpus=gpus)

    def _load_ahead(self, config: RunConfig) -> TrainingParts | None:
        from actors.training.training import TrainingParts, can_be_loaded_ahead

        journal = Journal(self._paths.events, self._attempt, time.time)
        return TrainingParts.load(config, journal, ranks=self._ranks) if can_be_loaded_ahead(config) else None

    @ray.method(concurrency_group="train")
    def restore(self, global_step: int, lineage: int, incident: int | None) -> int:
        return self._begun().restore(global_step, lineage, incident)

    @ray.method(concurrency_group="train")
    def run(self) -> TrainerEnd:
        return self._begun().run()

    @ray.method(concurrency_group="ctl")
    def view(self) -> TrainerView:
        """Always answers, in an empty process too."""
        if self._training is None:
            view = TrainerView(pid=os.getpid(), busy=self._busy, is_parked=self._stands_by())
        else:
            view = self._training.view()
        ranks = () if self._ranks is None else tuple(self._ranks.where)
        return replace(view, node=this_node(), gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""), ranks=ranks)

    @ray.method(concurrency_group="ctl")
    def allow(self) -> None:
        self._begun().allow()

    @ray.method(concurrency_group="ctl")
    def pause(self, save: bool) -> None:
        self._begun().pause(save=save)

    @ray.method(concurrency_group="ctl")
    def set_servers(self, servers: Sequence[ServerInfo]) -> None:
        self._begun().servers.set_servers(servers)

    @ray.method(concurrency_group="ctl")
    def limit_rollouts(self, max_concurrent: int) -> None:
        self._begun().servers.limit_rollouts(max_concurrent)

    @ray.method(concurrency_group="mend")
    def send_weights(self, server: ServerInfo, lineage: int) -> int:
        return self._begun().servers.send_weights(server, lineage)

    @ray.method(concurrency_group="mend")
    def admit(self, server: ServerInfo) -> float | None:
        return self._begun().servers.admit(server)

    @ray.method(concurrency_group="mend")
    def drain_server(self, name: str, within_s: float) -> int:
        return self._begun().servers.drain(name, within_s=within_s)

    @ray.method(concurrency_group="mend")
    def score_canaries(self) -> CanaryRound:
        return self._begun().score_canaries()

    @ray.method(concurrency_group="ctl")
    def close(self) -> None:
        if self._training is not None:
            self._training.close()

    def _begun(self) -> Training:
        if self._training is None:
            raise TrainerError("the trainer has not started")
        return self._training


@functools.cache
def _monitor() -> Any:
    """The handle stays valid across restarts; each look-up is a call to the cluster's store."""
    return ray.get_actor(MONITOR)


def ask_monitor(report: BatchReport) -> Admission:
    """Ask the HealthMonitor once. Raises MonitorAway, or RunError where the monitor raised an error.

    A monitor that fails at a batch would fail at it for ever, so it must not be waited for. Ray gives the actor's own
    error its type too, so a ValueError raised by the monitor is not the one for an unknown name.
    """
    from actors.training.admission_gate import MonitorAway

    if not holds_lease():
        raise MonitorAway("this trainer is cut off from the cluster: another may be stepping")
    try:
        answer = cast(Admission, ray.get(_monitor().admit.remote(report), timeout=GATE_TIMEOUT_S))
    except RayTaskError as error:
        raise RunError(
            f"the HealthMonitor failed at the gate: {error.cause!r}", "this is a defect; see the logs of its actor"
        ) from error
    except (RayError, ValueError) as error:  # ValueError: no actor of that name
        raise MonitorAway(f"the HealthMonitor does not answer: {type(error).__name__}") from error
    return answer
