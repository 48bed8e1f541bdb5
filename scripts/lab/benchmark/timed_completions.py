"""A run that writes down when each part of a completion arrives: `python -m scripts.lab.benchmark.timed_completions`.

Its arguments are settings, as those of `python -m launcher`. For measuring alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import ray

from actors.rollout.group_progress import GroupProgress
from actors.serving import completions
from actors.supervision import run_actors
from actors.training.trainer import Trainer
from launcher import driver
from launcher.base.messages import TrainerReady
from launcher.base.rollouts import Completion
from launcher.config.compose import compose
from launcher.run_files.run_paths import RunPaths

TOKENS = "tokens.jsonl"
IS_AGAIN = ContextVar("is_again", default=False)
"""Whether the request of this task asks for what an earlier one has not brought to its end."""


class TimedTrainer(Trainer.__ray_metadata__.modified_class.__ray_actor_class__):  # type: ignore[misc, name-defined]
    """The trainer's actor, with a line for each part of a rollout's completions."""

    def start(self, *given: Any, **named: Any) -> TrainerReady:
        ready: TrainerReady = super().start(*given, **named)  # whatever the Coordinator gives the trainer's own
        write_down(self._paths)
        return ready

    start.__ray_concurrency_group__ = "train"  # type: ignore[attr-defined]  # as the method that it takes the place of


def write_down(paths: RunPaths) -> None:
    """From now on, in this process."""
    file = (paths.logs / TOKENS).open("a", buffering=1)
    read, ask = completions.completion_from, GroupProgress.request
    asked: dict[int, object] = {}  # the samplings of each group, which its copies share; kept, so that no id is reused

    def request(progress: GroupProgress) -> Any:
        """Called in the task that sends it, which reads the answer too."""
        samplings = progress._samplings
        IS_AGAIN.set(id(samplings) in asked)
        asked[id(samplings)] = samplings
        return ask(progress)

    def timed(
        answer: Mapping[str, Any],
        *,
        server: str,
        is_part: bool = False,
        vocabulary: int | None = None,
        labels: dict[str, int] | None = None,
    ) -> Completion:
        made = read(answer, server=server, is_part=is_part, vocabulary=vocabulary, labels=labels)
        line = {"monotonic": time.monotonic(), "server": server, "version": made.weight_version}
        line["is_again"] = IS_AGAIN.get()
        file.write(json.dumps(line) + "\n")
        return made

    completions.completion_from = timed
    GroupProgress.request = request  # type: ignore[method-assign, assignment]


def run(trainer: type) -> int:
    """A run of the command line's settings with another class for its trainer."""
    run_actors.Trainer = ray.remote(concurrency_groups={"train": 1, "ctl": 4, "mend": 16})(trainer)  # type: ignore
    return driver.run(compose(sys.argv[1:]))


if __name__ == "__main__":
    from scripts.lab.benchmark import timed_completions  # by its name, so that Ray's workers find the class  # noqa: PLW0406

    sys.exit(run(timed_completions.TimedTrainer))
