"""Copies every committed checkpoint to `recover.url` beside the run, and fetches one where the disk is empty.

What is there is compared with what is here, again and again; nothing is remembered. So a trainer that was killed, or a
copy that failed, is made up for by the next turn, and what a restore set aside here is taken away there. The newest is
copied first: where copies take longer than saves, those between them are left out once retention has removed them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from launcher.base.errors import CheckpointError, ConfigError, LauncherError
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_folder import Checkpoint, CheckpointState, list_folder
from launcher.checkpoints.checkpoint_store import SET_ASIDE, CheckpointStore
from launcher.checkpoints.remote_store import NotWanted, RemoteStore
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths

WAIT_FIRST_S = 1.0
WAIT_MOST_S = 60.0
"""Between two tries of what failed: twice as long each time, at most so long."""
NICE = 10
"""Copying yields to whatever steps."""
LATE_S = 600.0
"""A turn that has been under way for so long is told: of a peer that accepts and says nothing nobody would hear."""

T = TypeVar("T")

log = logging.getLogger(__name__)


def remote_of(config: RunConfig) -> RemoteStore | None:
    """None where no URL is given. Raises ConfigError."""
    if config.recover.url is None:
        return None
    return RemoteStore(config.recover.url, experiment_name=config.experiment_name, trial_name=config.trial_name)


class Uploader:
    """`turn` is one comparison and what follows from it; `start` has a thread take turns. One for a run at a time."""

    def __init__(self, remote: RemoteStore, store: CheckpointStore, journal: Journal, *, keep_last: int) -> None:
        self._remote = remote
        self._store = CheckpointStore(store.root)  # reads alone, beside the one that writes
        self._journal = journal
        self._keep_last = keep_last
        self._set_back_to: int | None = None
        self._reason = ""
        self._turn_began: float | None = None  # None: none is under way
        self._wake = threading.Event()
        self._is_over = False
        self._thread: threading.Thread | None = None

    # ── beside the run ──

    def committed(self) -> None:
        """There may be something to copy. Costs nothing."""
        began = self._turn_began
        if began is not None and time.monotonic() - began > LATE_S:
            self._report_failure(None, f"a copy has been under way for more than {LATE_S:g} s")
        self._wake.set()

    def set_back(self, global_step: int) -> None:
        """The run resumes after this step: what is there of later ones is no checkpoint of it any more."""
        self._set_back_to = global_step
        if self._thread is None:  # not before: what is here may be about to be set aside
            self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """Without waiting: a copy under way has no manifest yet, and the driver makes up for it."""
        self._is_over = True
        self._wake.set()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # of this thread alone, on Linux
        wait_s = WAIT_FIRST_S
        while not self._is_over:
            self._wake.clear()
            try:
                while not self._is_over and self.turn():
                    wait_s = WAIT_FIRST_S
                self._wake.wait()
            except CheckpointError as error:
                log.warning("%s", error.message)
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, WAIT_MOST_S)

    # ── one turn ──

    def turn(self) -> bool:
        """Take away what is no longer, copy the newest that is missing. Is there perhaps more to do?

        Raises CheckpointError, written to the journal once for each reason.
        """
        newest: Checkpoint | None = None
        self._turn_began = time.monotonic()
        try:
            there = self._without_superseded(self._remote.list())
            copied = {one.name: one.files for one in there}
            missing = [one for one in self._here() if one.files != copied.get(one.name)]
            newest = missing[-1] if missing else None
            if newest is None:
                self._make_room(there)
                return False
            self._copy(newest)
        except CheckpointError as error:
            self._report_failure(newest, error.message)
            raise
        finally:
            self._turn_began = None
        self._reason = ""
        return True

    def _here(self) -> list[Checkpoint]:
        return [one for one in self._store.list() if one.state is CheckpointState.COMMITTED]

    def _without_superseded(self, there: tuple[Checkpoint, ...]) -> tuple[Checkpoint, ...]:
        """Take away what is later than the run was set back to, and what lies aside here: the process that was set back
        may have ended while the URL was away."""
        step = self._set_back_to
        here = [(one.name, one.files) for one in self._here()]
        aside = [one for one in list_folder(self._store.root / SET_ASIDE) if ".damaged-" not in one.path.name]
        undone = [mine for one in aside if one.manifest and (mine := (one.name, one.files)) not in here]
        gone = {
            one.name
            for one in there
            if (step is not None and one.global_step > step) or (one.name, one.files) in undone
        }
        for name in gone:
            self._remote.remove(name)
        if self._set_back_to == step:
            self._set_back_to = None
        return tuple(one for one in there if one.name not in gone)

    def _copy(self, checkpoint: Checkpoint) -> None:
        started = time.monotonic()
        try:
            self._remote.upload(checkpoint, is_wanted=lambda: checkpoint.path.is_dir() and not self._is_over)
        except NotWanted:
            if not self._is_over:
                self._remote.remove(checkpoint.name)
            return
        self._journal.record(
            "checkpoint.uploaded",
            subject=str(checkpoint),
            global_step=checkpoint.global_step,
            to=self._remote.where,
            bytes=checkpoint.manifest.total_bytes if checkpoint.manifest else 0,
            seconds=time.monotonic() - started,
        )

    def _make_room(self, there: tuple[Checkpoint, ...]) -> None:
        """As here: what retention has removed on this disk goes there too, unless it is of the newest or for good.

        A disk that has few of its own yet says nothing of what may go.
        """
        here = {one.name for one in self._here()}
        if len(here) < self._keep_last:
            return
        for one in there[: -self._keep_last]:
            if not one.keep and one.name not in here:
                self._remote.remove(one.name)

    def _report_failure(self, checkpoint: Checkpoint | None, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            self._journal.record(
                "checkpoint.upload_failed",
                subject="checkpoints" if checkpoint is None else str(checkpoint),
                reason=reason,
                global_step=None if checkpoint is None else checkpoint.global_step,
            )

    # ── the driver's part ──

    def finish(self, within_s: float) -> str:
        """After the run: copy what is still missing. Why it is not all there; "" if it is."""
        give_up_at, wait_s, reason = time.monotonic() + within_s, WAIT_FIRST_S, "not within recover.url_timeout"
        while (left_s := give_up_at - time.monotonic()) > 0:
            try:
                if not in_time(self.turn, left_s):
                    return ""
            except CheckpointError as error:
                reason = error.message
                time.sleep(min(wait_s, max(0.0, give_up_at - time.monotonic())))
                wait_s = min(2 * wait_s, WAIT_MOST_S)
        return reason


def in_time(work: Callable[[], T], within_s: float) -> T:
    """What `work` returns, or raises. Raises CheckpointError where it does neither in time: a peer that accepts and
    says nothing is waited for by most protocols without an end."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="uploads", daemon=True).start()  # a stuck one holds up no end of the process
    try:
        return done.result(within_s)
    except TimeoutError as error:
        if done.done():
            raise
        raise CheckpointError(f"not done within {within_s:.3g} s", "see whether it answers others") from error


def fetch_if_empty(config: RunConfig, paths: RunPaths, remote: RemoteStore) -> Checkpoint | None:
    """Where this disk holds nothing of the run, the newest complete checkpoint from the URL, which now is on the disk.

    Raises ConfigError where it can't be used, where all checkpoints at the URL are damaged, and where the URL
    holds later steps than a disk that is not empty: to resume from here would throw them away.
    """
    try:
        in_time(remote.check, config.recover.url_timeout)
        there = in_time(remote.list, config.recover.url_timeout)
    except CheckpointError as error:
        raise ConfigError(f"recover.url: {error.message}", "see to it, or set recover.url=null") from error
    store = CheckpointStore(paths.default_checkpoints)
    if there and config.recover.mode == "off":
        raise ConfigError(
            f"recover.mode=off, but {remote.where} already holds checkpoints of this trial",
            "give the new run another trial_name, or resume with recover.mode=auto",
        )
    newest_here = _newest_step_here(config, paths, store)
    if newest_here is not None:
        _refuse_to_throw_away(there, newest_here, store, remote)
        return None
    reasons = []
    for one in reversed(there):
        try:
            return remote.fetch(one, store)
        except LauncherError as error:
            reasons.append(error.message)
    if reasons:
        raise ConfigError(
            f"no complete checkpoint at {remote.where}: {'; '.join(reasons)}", "start over with another trial_name"
        )
    return None


def record_fetched(fetched: Checkpoint, remote: RemoteStore, journal: Journal) -> str:
    """Record it in the journal; returns it as text."""
    journal.record(
        "checkpoint.fetched",
        subject=str(fetched),
        reason="this disk held nothing of the run",
        global_step=fetched.global_step,
        source=remote.where,
    )
    return f"{fetched} was fetched from {remote.where}, and is complete"


def finish_uploads(config: RunConfig, paths: RunPaths, remote: RemoteStore, journal: Journal) -> str:
    """Copy what the trainer has not yet. The checkpoints are safe on this disk whatever becomes of it: why they are
    not all there, "" if they are."""
    store = CheckpointStore(paths.default_checkpoints)
    uploader = Uploader(remote, store, journal, keep_last=config.recover.keep_last)
    try:
        problem = uploader.finish(config.recover.url_timeout)
    except KeyboardInterrupt:
        problem = "ended by the user"
    return f"not every checkpoint was copied to {remote.where}: {problem}" if problem else ""


def _newest_step_here(config: RunConfig, paths: RunPaths, store: CheckpointStore) -> int | None:
    in_memory = CheckpointCatalog.of_run(config, paths).newest_in_memory()
    return max([one.global_step for one in (*store.list(), in_memory) if one is not None], default=None)


def _refuse_to_throw_away(
    there: tuple[Checkpoint, ...], newest_here: int, store: CheckpointStore, remote: RemoteStore
) -> None:
    """Those that this disk has set aside itself may go."""
    aside = store.root / SET_ASIDE
    mine = {path.name.partition(".")[0] for path in aside.iterdir()} if aside.is_dir() else set()
    later = [one for one in there if one.name.global_step > newest_here and str(one.name) not in mine]
    if later:
        raise ConfigError(
            f"{remote.where} holds step {later[-1].name.global_step}, this disk only step {newest_here} ({store.root})",
            "for the later one, move that folder away; to resume from here, give this run another recover.url",
        )
