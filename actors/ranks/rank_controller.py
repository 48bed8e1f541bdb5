"""Rank 0's control of the other trainer ranks: starts them, runs one collective operation at a time, detects a failure.

Beside these each rank may be asked to write its part of the state.

A rank that ended, hangs or failed ends the group: `lost` names it with the reason, callers get a TrainerError, and the
trainer's view carries it to the Coordinator, which restarts the trainer's process and with it every rank. A collective
may wait for the lost rank, out of reach of any exception; if nobody ends this process, it ends itself after a while.

A parked trainer has such a group too, which on a CPU has met. Torch is imported by what meets: the ranks start, and
import, beside the imports of rank 0.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors.cluster.node_identity import is_here
from actors.processes.process_tree import errors_file, process_state
from actors.ranks.trainer_rank import TrainerRank
from actors.serving.server_log_tail import words_of_abort
from launcher.base.errors import TrainerError
from launcher.base.rank_location import RankLocation
from launcher.config.schema import RunConfig
from launcher.policy.observation_history import STOPPED
from launcher.resources.hardware import OomKillWatch
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths

if TYPE_CHECKING:
    import torch

    from actors.model.learner import Learner
    from actors.model.rank_collectives import RankGroup

LOOPBACK = "127.0.0.1"
LOOK_S = 1.0
"""Between two signs of life; a rank's end is noticed at once."""
SILENCE_FACTOR = 6
"""Times health.trainer_silence_s for a rank that may merely be slow; once for one that is seen to be stopped."""
SETTLE_S = 0.5
"""A rank's end makes the others fail, and may be reported after them: so long one that failed is not yet the reason."""
EXPLAIN_S = 5.0
"""How long a failed operation waits for the reason."""
GRACE_S = 10.0
"""For work that a lost rank blocks; the Coordinator, which looks each second, ends this process sooner."""
DEATH, GUESSES = "The actor is dead because", re.compile(r"(There are some potential root|Some common) causes")
LONGEST_REASON = 600
RANK_LOST = 9
"""Exit code of a rank 0 that a lost rank blocked."""

log = logging.getLogger("trainer")


class RankController:
    """`size` counts this process too. The ranks start at once; they are parked until `begin`, and asked for when they
    `prepare` or `meet`. `where`: each of them, once they are there."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        journal: Journal,
        options: Sequence[Mapping[str, Any]],
        *,
        niceness: int = 0,
        gpus: Sequence[str] = (),
    ) -> None:
        """`options`: Ray's, of each rank but the first: placement and resources. A name among them is not used, as a
        rank of the incarnation before may still have it. `niceness`: of their imports. `gpus`: of each that is parked.
        """
        self.size = config.actor.dp_size
        self.lost = ""
        self.where: Sequence[RankLocation] = ()
        self._config = config
        self._before: Sequence[RankLocation] = ()
        self._is_begun = self._has_met = False
        self._journal = journal
        self._start_s = config.health.trainer_first_s
        self._silence_s = config.health.trainer_silence_s
        self._working_since: float | None = None
        self._is_lost = threading.Event()
        self._losing = threading.Lock()
        self._is_closed = threading.Event()
        self._joining: list[Any] = []
        self._kills = OomKillWatch()
        nameless = [{key: value for key, value in own.items() if key != "name"} for own in options]
        if len(nameless) != self.size - 1:
            raise TrainerError(f"{len(nameless)} places for the {self.size - 1} trainer ranks beside the first")
        whose = gpus or [""] * len(nameless)
        self._ranks: list[Any] = [
            self._new(own, config, paths, rank, niceness, its)
            for rank, (own, its) in enumerate(zip(nameless, whose, strict=True), start=1)
        ]
        self._prepared = [rank.prepare.remote() for rank in self._ranks]

    def _new(self, options: Mapping[str, Any], *arguments: Any) -> Any:
        return TrainerRank.options(max_restarts=0, max_task_retries=0, **options).remote(*arguments)  # type: ignore[attr-defined]

    def begin(self, config: RunConfig, before: Sequence[RankLocation]) -> None:
        """They are the trainer's from now on, with the settings of `config`. `before`: the ranks of the incarnation
        before, each of which is gone before its successor takes memory of its GPU."""
        self._config = config
        self._before = before
        self._is_begun = True
        if self._has_met:
            self._record_meeting()

    def hurry(self) -> None:
        """Their imports have the usual priority from now on, where that is allowed."""
        for rank in self._ranks:
            rank.hurry.remote()

    def answers(self, within_s: float) -> bool:
        """Whether all answer now."""
        try:
            ray.get([rank.ping.remote() for rank in self._ranks], timeout=within_s)
        except RayError:
            return False
        return not self.lost

    def prepare(self) -> None:
        """Wait until all have imported what takes long, watched as soon as they are there. Raises TrainerError."""
        if self.where:
            return
        try:
            self.where = tuple(ray.get([rank.where.remote() for rank in self._ranks], timeout=self._start_s))
            self._errors = [errors_file(one.pid) if is_here(one.node) else None for one in self.where]
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
            ray.get(self._prepared, timeout=self._start_s)
        except GetTimeoutError as error:
            raise TrainerError(
                f"the trainer's {self.size} ranks have not started within {self._start_s:g} s",
                "is there room for each? `ray status` shows what is taken; actor.num_cpus and actor.gpu_fraction are "
                "what each rank asks for",
            ) from error
        except RayError as error:
            raise TrainerError(f"a trainer rank did not start: {said(error)}") from error

    def meet(self, device: torch.device) -> RankGroup:
        """Wait for all, and make one group of them. Raises TrainerError."""
        from actors.model.rank_collectives import MeetingPlace, RankGroup

        self.prepare()
        here = ray.get_runtime_context().get_node_id()
        own, *others = self._addresses([here, *(where.node for where in self.where)])
        before: Sequence[RankLocation | None] = self._before or [None] * len(self._ranks)
        self._working_since = time.monotonic()
        try:
            self._check()
            place = MeetingPlace(own, size=self.size, timeout_s=self._start_s)
            self._joining = [
                rank.join.remote(self._config, place.rendezvous, address, was)
                for rank, address, was in zip(self._ranks, others, before, strict=True)
            ]
            group = RankGroup.join(place.rendezvous, 0, own_address=own, device=device, place=place)
        finally:
            self._working_since = None
        self._has_met = True
        if self._is_begun:
            self._record_meeting()
        return group

    def _record_meeting(self) -> None:
        here = RankLocation(node=ray.get_runtime_context().get_node_id(), pid=os.getpid())
        all_of_them = (here, *self.where)
        self._journal.record(
            "trainer.ranks_met",
            subject="trainer",
            reason=f"{self.size} ranks",
            pids=[one.pid for one in all_of_them],
            nodes=[one.node for one in all_of_them],
        )

    @staticmethod
    def _addresses(nodes: Sequence[str]) -> list[str]:
        """Under which the nodes reach each other; where all are one machine, on its loopback."""
        known = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in ray.nodes()}  # type: ignore[no-untyped-call]
        addresses = [known[node] for node in nodes]
        is_one_machine = len(set(addresses)) == 1 or all(address.startswith("127.") for address in addresses)
        return [LOOPBACK] * len(nodes) if is_one_machine else addresses

    def call(self, learner: Learner, order: str, arguments: Sequence[Sequence[Any]]) -> Any:
        """Have each rank's learner carry out `order` with its arguments; returns rank 0's answer. One order at a time.

        Raises TrainerError where a rank is lost, and what rank 0's learner raises. After either, all ranks are lost.
        """
        import torch

        self._working_since = time.monotonic()
        try:
            self._check()
            asked = [
                *self._joining,
                *(rank.call.remote(order, *own) for rank, own in zip(self._ranks, arguments[1:], strict=True)),
            ]
            self._joining = []
            answer = getattr(learner, order)(*arguments[0])
            self._wait(asked)
        except torch.OutOfMemoryError as error:  # a RuntimeError too, and one's own
            self._lose(f"trainer rank 0 failed: {order}: torch.OutOfMemoryError: {error}")
            raise
        except (RuntimeError, RayError) as error:
            self._is_lost.wait(EXPLAIN_S)
            self._lose(f"the trainer's ranks failed together: {order}: {said(error)}")
            raise TrainerError(self.lost) from error
        except Exception as error:
            self._lose(f"trainer rank 0 failed: {order}: {error}")
            raise
        finally:
            self._working_since = None
        return answer

    def ask_each(self, learner: Learner, order: str, *arguments: Any, **named: Any) -> list[Any]:
        """What each rank's learner answers, rank 0's first; beside `call`.

        Raises TrainerError where a rank is lost, and what a learner raises, which loses no rank.
        """
        self._check()
        self._finish_joining()
        try:
            asked = [rank.ask.remote(order, arguments, named) for rank in self._ranks]
            try:
                own = getattr(learner, order)(*arguments, **named)
            finally:
                self._wait_for_all(asked)
            return [own, *ray.get(asked)]
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            self._is_lost.wait(EXPLAIN_S)
            raise TrainerError(self.lost or f"a trainer rank did not answer: {order}: {said(error)}") from error

    def close(self) -> None:
        """End the others."""
        self._is_closed.set()
        for rank in self._ranks:
            with contextlib.suppress(RayError):
                ray.kill(rank)

    def _finish_joining(self) -> None:
        """The first weights are written before the first order to all."""
        try:
            self._wait(self._joining)
        except RayError as error:
            self._is_lost.wait(EXPLAIN_S)
            self._lose(f"the trainer's ranks did not meet: {said(error)}")
            raise TrainerError(self.lost) from error
        self._joining = []

    def _wait_for_all(self, asked: list[Any]) -> None:
        """Also where one has failed: nobody may still be writing when the folder is given up, or written again."""
        while asked:
            _, asked = ray.wait(asked, num_returns=len(asked), timeout=LOOK_S)
            self._check()

    def _wait(self, asked: list[Any]) -> None:
        while asked:
            done, asked = ray.wait(asked, num_returns=len(asked), timeout=LOOK_S)
            ray.get(done)
            self._check()

    def _check(self) -> None:
        """Once the work is known to have begun: of a loss before it nobody would end this process, of one since then
        the thread that watches does."""
        if self.lost:
            raise TrainerError(self.lost)

    # ── watching, on a separate thread ──

    def _watch(self) -> None:
        stays = [rank.stay.remote() for rank in self._ranks]
        pings: dict[int, tuple[Any, float]] = {}
        while not self._is_closed.is_set():
            if ray.wait(stays, timeout=LOOK_S)[0]:
                ended, failed = self._ended(stays)
                if not ended:
                    time.sleep(SETTLE_S)
                    ended, failed = self._ended(stays)
                reason = ended or failed
            else:
                self._kills.note_count()
                reason = self._mute(pings)
            if reason:
                if not self._is_closed.is_set():
                    self._lose(reason)
                    self._end_if_held_up()
                return

    def _ended(self, stays: Sequence[Any]) -> tuple[str, str]:
        """The rank that ended, and one that failed, perhaps because of it."""
        ended, failed = "", ""
        for rank, stay in enumerate(stays, start=1):
            if not ray.wait([stay], timeout=0)[0]:
                continue
            try:
                ray.get(stay)
            except RayTaskError as error:
                failed = failed or f"trainer rank {rank} failed: {said(error)}"
            except RayError as error:
                ended = ended or f"{self._name(rank)} ended: {said(error)}{self._memory()}{self._last_words(rank)}"
        return ended, failed

    def _mute(self, pings: dict[int, tuple[Any, float]]) -> str:
        """Counted in looks, not seconds: a pause of this process accuses nobody."""
        for rank, handle in enumerate(self._ranks, start=1):
            pending, silent_s = pings.get(rank, (None, 0.0))
            if pending is None or ray.wait([pending], timeout=0)[0]:
                pings[rank] = (handle.ping.remote(), 0.0)
                continue
            silent_s += LOOK_S
            pings[rank] = (pending, silent_s)
            where = self.where[rank - 1]
            is_stopped = process_state(where.pid)[0] == STOPPED and is_here(where.node)
            if silent_s > self._silence_s * (1 if is_stopped else SILENCE_FACTOR):
                return f"{self._name(rank)} does not answer for {silent_s:.0f} s" + is_stopped * ", it is stopped"
        return ""

    def _name(self, rank: int) -> str:
        where = self.where[rank - 1]
        return f"trainer rank {rank} (process {where.pid} of node {where.node[:8]})"

    def _memory(self) -> str:
        killed = self._kills.risen()
        return f"; Out of memory: Killed process (oom_kill {killed})" if killed else ""

    def _last_words(self, rank: int) -> str:
        """Of one that aborted on this node."""
        words = words_of_abort(self._errors[rank - 1]).splitlines()[:2]
        return f"; it printed: {' '.join(words)[:LONGEST_REASON]}" if words else ""

    def _lose(self, reason: str) -> None:
        with self._losing:
            if self.lost:
                return
            self.lost = reason
        self._is_lost.set()
        log.error("%s", reason)
        if self._is_begun:
            self._journal.record("trainer.rank_lost", subject="trainer", reason=reason)

    def _end_if_held_up(self) -> None:
        give_up_at = time.monotonic() + GRACE_S
        while self._working_since is not None and not self._is_closed.is_set():
            if time.monotonic() > give_up_at:
                log.error("held up by a lost rank: this process ends")
                os._exit(RANK_LOST)
            time.sleep(LOOK_S)


def said(error: Exception) -> str:
    """One line: a task's innermost error; of Ray's text on a death the facts without the guesses."""
    inner = error.cause if isinstance(error, RayTaskError) else error
    text = " ".join(str(inner).split())
    known = text[max(text.find(DEATH), 0) :]
    if guesses := GUESSES.search(known):
        known = known[: guesses.start()]
    return known.strip()[:LONGEST_REASON]
