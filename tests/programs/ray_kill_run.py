"""An actor that Ray ends for memory, on a cluster of its own: `python -m tests.programs.ray_kill_run FOLDER`.

It is to be started with RAY_memory_usage_threshold so low that Ray finds the machine full at once. Prints one JSON
object: whether the process ended, and what Ray says of it.
"""

import asyncio
import functools
import json
import logging
import os
import sys
import time

import ray

from actors.cluster.ray_cluster import start_patiently
from actors.cluster.ray_oom_kills import killed_for_memory
from actors.processes.exit_watch import process_ended

LIVES = 5
"""At most: of a death that Ray notes late nothing is said, which a busy machine may bring about."""

log = logging.getLogger("ray kills")


@ray.remote(max_restarts=-1, max_task_retries=0)
class Trainer:
    def pid(self) -> int:
        return os.getpid()

    def run(self) -> None:
        time.sleep(1000)


def pid_of(actor) -> int:
    while True:
        try:
            return ray.get(actor.pid.remote())
        except ray.exceptions.RayError:  # between two lives
            time.sleep(0.1)


async def end_of(pid: int) -> tuple[bool, str]:
    return await process_ended(pid), await killed_for_memory(ray.get_runtime_context().get_node_id(), pid)


async def main() -> None:
    actor = Trainer.remote()
    ended, said, silent = False, "", 0
    while not (ended and said) and silent < LIVES:  # one that is gone before it could be waited for is no witness
        waiting = asyncio.create_task(end_of(pid_of(actor)))
        actor.run.remote()
        ended, said = await waiting
        silent += ended and not said
    print(json.dumps({"ended": ended, "said": said}), flush=True)


if __name__ == "__main__":
    start = functools.partial(
        ray.init, num_cpus=1, include_dashboard=True, object_store_memory=80 * 2**20, _temp_dir=sys.argv[1]
    )
    start_patiently(start, log.warning)
    asyncio.run(main())
