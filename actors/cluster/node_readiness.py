"""Checks, before anything is started, that each node of the cluster can run what this run may place there.

The checks are those of the pre-flight and of the doctor (`launcher/resources/node_checks.py`), made by a task on each
node, in the environment that Ray gives the run's actors there.
"""

from __future__ import annotations

import ray

from actors.cluster.node_answers import NodeAnswer, ask_each_node
from launcher.base.errors import ResourceError
from launcher.base.findings import Finding
from launcher.config.schema import RunConfig
from launcher.resources.node_checks import LEAST_OF_A_NODE, check_node, missing_on_node


@ray.remote
def _check_this_node() -> tuple[Finding, ...]:
    """On one node, where Ray runs already."""
    return check_node(least_threads=LEAST_OF_A_NODE)


def ask_nodes() -> list[NodeAnswer]:
    """The checks of every node; an answer is a tuple of Finding."""
    return ask_each_node(_check_this_node)


def check_nodes(config: RunConfig) -> None:
    """Raises ResourceError with everything that stops the run on a node, each finding with its nodes."""
    if problem := node_problems(config, ask_nodes()):
        raise ResourceError(problem, "nothing was started; `python -m launcher doctor` on such a node shows all of it")


def node_problems(config: RunConfig, answers: list[NodeAnswer]) -> str:
    """One text for all nodes, "" where nothing is missing. On a node without GPUs nothing of the run needs one."""
    wants_gpus = {config.sglang.device, config.actor.device} != {"cpu"}
    where: dict[str, list[str]] = {}
    for one in answers:
        devices = ("cuda",) if wants_gpus and one.gpus else ()
        for error in () if one.problem else missing_on_node(config, devices, one.answer):
            where.setdefault(str(error), []).append(one.address)
        if one.problem:
            where.setdefault(one.problem, []).append(one.address)
    lines = [f"node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)}: {text}" for text, nodes in where.items()]
    return "\n  ".join(lines if len(lines) < 2 else [f"{len(lines)} findings:", *lines])
