"""WandB as a sink of the run's metrics: online, offline or off (`stats_logger.wandb.mode`).

WandB may have no key, no network, or hang; none of that is a reason for a run to wait or to end. So one daemon thread
owns everything of wandb, the run only puts lines into its queue, and each failure becomes a sentence for the user
and a count. What WandB misses is in metrics.jsonl all the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import psutil

from launcher.config.reporting import WandbConfig
from launcher.run_files.run_paths import RunPaths

INIT_TIMEOUT_S = 20.0
"""For WandB's server to answer at the start, before the run is logged offline instead."""
FINISH_TIMEOUT_S = 30.0
"""For the last upload; what is not there by then can be sent with `wandb sync`."""
HANGING_AFTER_S = 5.0
"""Beyond FINISH_TIMEOUT_S, which wandb itself keeps: then it hangs and is ended."""
MOST_QUEUED = 10_000
LONGEST_ID = 128
STEP_KEY = "global_step"
ALERT = "alert"
"""Key of a queued line that is an alert and no metric; no metric bears it, since theirs all have a slash."""


def wandb_run_id(experiment_name: str, trial_name: str) -> str:
    """AReaL's id, `{experiment}_{trial}_train`, in the letters and the length that WandB accepts.

    The same for every attempt, so that a resumed run continues the same curve. A name that had to be changed gets
    a digest of the original: two trials must never share an id.
    """
    name = f"{experiment_name}_{trial_name}_train"
    safe = re.sub(r"[^A-Za-z0-9_.-]", "-", name)
    if safe == name and len(name) <= LONGEST_ID:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{safe[: LONGEST_ID - 9]}-{digest}"


class WandbSink:
    """Takes lines of metrics.jsonl. Never blocks and never raises; `finish` takes FINISH_TIMEOUT_S at most,
    and twice HANGING_AFTER_S more where wandb hangs.

    `global_step` is the axis of every curve, not WandB's own counter, which can't go back: after a restore to an
    earlier step the repeated steps would be dropped.
    """

    def __init__(
        self, config: WandbConfig, paths: RunPaths, *, settings: Mapping[str, object], say: Callable[[str], None]
    ) -> None:
        """`settings` is the run's resolved configuration. `say` shows a sentence to the user, from another thread."""
        self._config = config
        self._paths = paths
        self._settings = settings
        self._tell = say
        self._given_up = False
        self._queue: queue.Queue[Mapping[str, object] | None] = queue.Queue(MOST_QUEUED)
        self.mode = config.mode
        """online, offline or disabled, as it turned out."""
        self.missed = 0
        """Lines that did not reach WandB."""
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        if config.mode != "disabled":
            self._thread.start()

    def log(self, values: Mapping[str, object]) -> None:
        """Queue one line of metrics; it must hold `global_step`."""
        if self.mode == "disabled":
            return
        try:
            self._queue.put_nowait(dict(values))
        except queue.Full:
            self._miss("WandB takes no lines any more")

    def alert(self, title: str, text: str) -> None:
        """Queue a message to the run's owner, as `wandb.alert` sends it: by mail or chat, as they have set it there."""
        self.log({ALERT: (title, text)})

    def finish(self) -> None:
        """Send what is queued and end wandb's process. Whatever hangs is ended."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):  # a thread that takes nothing any more is ended below
            self._queue.put_nowait(None)
        self._thread.join(FINISH_TIMEOUT_S + HANGING_AFTER_S)
        if self._thread.is_alive():
            self._say(f"WandB did not finish in time; `wandb sync {self._paths.logs / 'wandb'}/*run-*` sends the rest")
            self._given_up = True
            _kill_service()
            self._thread.join(HANGING_AFTER_S)  # it tears wandb down, so that the exit has nothing to wait for

    def _say(self, sentence: str) -> None:
        if not self._given_up:  # what its thread prints while it is being ended is of no use to anyone
            self._tell(sentence)

    def _work(self) -> None:
        try:
            run = self._start()
            while (values := self._queue.get()) is not None:
                self._send(run, values)
            run.finish()
        except Exception as error:  # noqa: BLE001 - the outer skin of a third party in its own thread
            self.mode = "disabled"
            self._say(f"WandB is off: {_one_line(error)}")
        finally:
            _tear_down()

    def _send(self, run: Any, values: Mapping[str, object]) -> None:
        try:
            if ALERT in values:
                title, text = cast(tuple[str, str], values[ALERT])
                run.alert(title=title, text=text, wait_duration=0)
            else:
                run.log(values)
        except Exception as error:  # noqa: BLE001 - a metrics call must not end a run
            self._miss(_one_line(error))

    def _miss(self, why: str) -> None:
        self.missed += 1
        if self.missed == 1:
            self._say(f"WandB misses steps: {why}; metrics.jsonl has them all")

    def _start(self) -> Any:
        wandb = _import_wandb()
        if self._config.mode == "online":
            try:
                return self._init("online", _require_key(wandb))
            except Exception as error:  # noqa: BLE001 - no key, no network, no permission: all mean offline
                self._say(f"WandB continues offline: {_one_line(error)}; `wandb sync` sends the run later")
                _tear_down()  # else its service still holds the run id and refuses it to the next init
        self.mode = "offline"
        return self._init("offline", wandb)

    def _init(self, mode: str, wandb: Any) -> Any:
        run = wandb.init(
            mode=mode,
            id=wandb_run_id(self._paths.experiment_name, self._paths.trial_name),
            resume="allow",
            project=self._config.project or self._paths.experiment_name,
            entity=self._config.entity,
            name=self._config.name or f"{self._paths.experiment_name}_{self._paths.trial_name}",
            group=self._config.group,
            tags=list(self._config.tags),
            config=dict(self._settings),
            dir=str(self._paths.logs),
            settings=wandb.Settings(
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                console="off",  # it would wrap stdout, which the live display owns
                silent=True,
            ),
        )
        run.define_metric(STEP_KEY)
        run.define_metric("*", step_metric=STEP_KEY)
        return run


def _import_wandb() -> Any:
    """wandb, set to print nothing. Imported only where it is used: that takes a second, and may fail."""
    import wandb

    wandb.setup(wandb.Settings(silent=True))
    return wandb


def _tear_down() -> None:
    """End wandb's service process, where there is one, and its hook at exit."""
    wandb: Any = sys.modules.get("wandb")
    with contextlib.suppress(Exception):  # a service that was killed answers with errors of any kind; it is gone
        if wandb is not None:
            wandb.teardown()


def _require_key(wandb: Any) -> Any:
    """wandb, if it has a key. Without one, `init` would ask on the terminal and wait for the answer for ever."""
    if not wandb.login(prompt=False, verify=False):
        raise PermissionError("no API key (`wandb login`, or WANDB_API_KEY)")
    return wandb


def _kill_service() -> None:
    """End wandb's service process of this process: at exit, wandb would wait for it without limit."""
    for child in psutil.Process(os.getpid()).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "wandb-core":
                child.kill()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
