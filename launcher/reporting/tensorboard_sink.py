"""TensorBoard as a sink of the run's metrics (`stats_logger.tensorboard.path`), beside WandB's.

A disk that is full or slow is no reason for a run to wait or to end. So a daemon thread of its own writes, and each
failure becomes a sentence for the user and a count. What TensorBoard misses is in metrics.jsonl all the same.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from launcher.run_files.run_paths import RunPaths
from launcher.run_log.step_line import REWARD

FINISH_S = 30.0
"""For what is queued to be written at the end."""
MOST_QUEUED = 10_000
NUMBERS = itertools.count()
"""Of this process's files: the library's names differ by the second alone, and it would write over one of the same."""


class TensorBoardSink:
    """Takes lines of metrics.jsonl. Never blocks and never raises.

    The first step of an attempt, and one that is repeated after a restore, begin a file that tells TensorBoard to drop
    what others have from that step on.
    """

    def __init__(self, path: str | None, paths: RunPaths, *, say: Callable[[str], None]) -> None:
        """`path`: above a folder for each experiment and trial; None: nothing is written. `say` shows a sentence to
        the user, from another thread."""
        self.folder = None if path is None else Path(path, paths.experiment_name, paths.trial_name)
        self._say = say
        self._queue: queue.Queue[Mapping[str, object] | None] = queue.Queue(MOST_QUEUED)
        self._writer: Any = None
        self._last_step: int | None = None
        self.missed = 0
        """Lines that TensorBoard does not have."""
        self._thread = threading.Thread(target=self._work, name="tensorboard", daemon=True)
        if self.folder is not None:
            self._thread.start()

    def log(self, values: Mapping[str, object]) -> None:
        """Queue one line; it must hold `global_step`."""
        if self._thread.is_alive():
            self._put(dict(values))

    def finish(self) -> None:
        """Write what is queued."""
        if self._thread.is_alive():
            self._put(None)
            self._thread.join(FINISH_S)

    def _put(self, values: Mapping[str, object] | None) -> None:
        try:
            self._queue.put_nowait(values)
        except queue.Full:
            self._miss("its folder takes no lines any more")

    def _work(self) -> None:
        while (values := self._queue.get()) is not None:
            try:
                self._write(values)
            except Exception as error:  # noqa: BLE001 - the outer skin of a third party in its own thread
                self._writer = self._last_step = None
                self._miss(" ".join(str(error).split())[:200] or type(error).__name__)

    def _miss(self, why: str) -> None:
        self.missed += 1
        if self.missed == 1:
            self._say(f"TensorBoard misses steps: {why}; metrics.jsonl has them all")

    def _write(self, values: Mapping[str, object]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        step = cast(int, values["global_step"])
        if REWARD in values:  # else it is of an evaluation, and late
            if self._last_step is None or step <= self._last_step:
                self._begin(drop_from=step)
            self._last_step = step
        elif self._writer is None:
            self._begin(drop_from=None)
        figures = Event(wall_time=time.time(), step=step)
        for key, value in values.items():
            if "/" in key and isinstance(value, int | float) and math.isfinite(value):
                figures.summary.value.extend(scalar(key, value).value)
        self._writer.write_event(figures)
        self._writer.flush()

    def _begin(self, *, drop_from: int | None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._writer is not None:
            self._writer.close()
        self._writer = EventsWriter(str(self.folder / "events"), f".{os.getpid()}.{next(NUMBERS)}")
        if drop_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(wall_time=time.time(), step=drop_from, session_log=start))
