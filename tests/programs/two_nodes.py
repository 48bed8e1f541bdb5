"""Two raylets of this machine, with 8 GPUs and 192 CPUs each that are bookkeeping alone.

`python -m tests.programs.two_nodes FOLDER` places several runs on them, one after another, and prints as JSON what came
of each: where Ray put what, which GPUs an actor was given, or what was said.
"""

import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from actors.cluster.placement_group import RunPlacement
from actors.cluster.ray_cluster import RAY_ENVIRONMENT, start_patiently
from launcher.base.errors import LauncherError
from launcher.config.compose import compose
from launcher.run_files.run_keys import make_ray_token
from tests.support.machine import scaled, wait_until

GPUS, CPUS = 8, 192
WHOLE = ("sglang.gpu_fraction=1", "actor.gpu_fraction=1")

log = logging.getLogger("two nodes")


@ray.remote(max_restarts=1, max_task_retries=5)
class Who:
    def is_at(self):
        return {"node": ray.get_runtime_context().get_node_id(), "gpus": sorted(map(int, ray.get_gpu_ids()))}

    def pid(self):
        return os.getpid()


def run(*overrides, within_s=None):
    """On a busy machine Ray may take longer for what is free than the 2 s after which what is not is refused."""
    within_s = within_s or int(scaled(30))
    return compose(["conf=gsm8k_h200_cluster", f"cluster.placement_timeout={within_s}", *overrides])


def placed(*overrides, ask=(), within_s=None):
    """What came of booking this run; its group is given back."""
    try:
        booked = RunPlacement.book(run(*overrides, within_s=within_s))
    except LauncherError as error:
        return {"said": error.message, "hint": error.hint}
    try:
        actors = {name: Who.options(**booked.options(name)).remote() for name in ask}
        return {
            "nodes": booked.nodes(),
            "at": {name: ray.get(actor.is_at.remote(), timeout=scaled(120)) for name, actor in actors.items()},
            "shares_gpu": booked.shares_gpu,
            "ranks": [options.get("name", "nameless") for options in booked.further_ranks()],
        }
    finally:
        give_back(booked)


def give_back(booked):
    ray.util.remove_placement_group(booked.group)
    wait_until(lambda: ray.available_resources().get("GPU") == 2 * GPUS)


def killed():
    """An actor that is killed: where it was, and where Ray brings it back."""
    booked = RunPlacement.book(run())
    actor = Who.options(**booked.options("server-3")).remote()
    before = ray.get(actor.is_at.remote(), timeout=scaled(120))
    pid = ray.get(actor.pid.remote(), timeout=scaled(120))
    os.kill(pid, 9)
    wait_until(lambda: ray.get(actor.pid.remote(), timeout=scaled(120)) != pid)
    after = ray.get(actor.is_at.remote(), timeout=scaled(120))
    ray.kill(actor)
    give_back(booked)
    return {"before": before, "after": after}


def held_by_another():
    """Two runs that each would fit alone."""
    booked = RunPlacement.book(run())
    said = placed(within_s=2)
    give_back(booked)
    return said


def connect():
    node = {"num_cpus": CPUS, "num_gpus": GPUS}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    except BaseException:
        cluster.shutdown()
        raise
    return cluster


def main() -> None:
    folder = tempfile.mkdtemp(prefix="ray-")
    token = str(make_ray_token(Path(sys.argv[1])))
    # Cluster notes its address in $RAY_TMPDIR/ray, whatever its temp_dir, and expects that folder: on a machine that
    # has never run Ray nobody else makes it.
    os.environ.update(RAY_ENVIRONMENT, RAY_AUTH_TOKEN_PATH=token, RAY_TMPDIR=folder)
    cluster = start_patiently(connect, log.warning)
    wait_until(lambda: ray.cluster_resources().get("GPU") == 2 * GPUS)
    small = ("sglang.n_servers=2", "actor.dp_size=2", "sglang.gpu_fraction=0.5", "actor.gpu_fraction=0.5")
    print(
        json.dumps(
            {
                "separate": placed(ask=("trainer", "trainer-1", "server-0", "server-7")),
                "colocated": placed(*small, ask=("trainer", "trainer-1", "server-0", "server-1")),
                "spread": placed("sglang.n_servers=2", "actor.dp_size=2", "cluster.placement=SPREAD"),
                "killed": killed(),
                "held": held_by_another(),
                "too_large": placed("actor.dp_size=10"),
                "larger_than_a_node": placed("sglang.n_servers=1", "sglang.tp_size=16"),
                "too_few": placed("cluster.n_nodes=3", "cluster.n_gpus_per_node=null"),
            }
        )
    )
    ray.shutdown()
    cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
