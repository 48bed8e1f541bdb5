"""Asks every node of the cluster the same question, in a task on each, before anything else is started there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.cluster.node_identity import alive_nodes
from launcher.base.errors import ResourceError

ANSWER_S = 90.0
"""For all nodes together: each may first have to start a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """`problem`: why there is no answer, "" where there is one. `gpus`: as Ray counts them."""

    node: str
    address: str
    gpus: float
    answer: Any = None
    problem: str = ""


def ask_each_node(task: Any, arguments: Callable[[str], tuple[Any, ...]] = lambda node: ()) -> list[NodeAnswer]:
    """Run `task` once on each node, with the `arguments` for its id. Raises ResourceError where it fails there."""
    asked = []
    for node in alive_nodes():
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        call = task.options(num_cpus=0, scheduling_strategy=here, max_retries=0).remote(*arguments(node["NodeID"]))
        asked.append((node, call))
    give_up_at = time.monotonic() + ANSWER_S
    return [_answer(node, call, max(0.0, give_up_at - time.monotonic())) for node, call in asked]


def _answer(node: dict[str, Any], call: Any, left_s: float) -> NodeAnswer:
    answer, problem = None, ""
    address = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
    try:
        answer = ray.get(call, timeout=left_s)
    except GetTimeoutError:
        problem = f"no answer within {ANSWER_S:g} s: is it overloaded, or does its file system hang?"
    except RayTaskError as error:
        raise ResourceError(
            f"node {address} failed at a check: {error.cause!r}",
            "is the same version of this program installed on every node?",
        ) from error
    except RayError as error:
        why = str(error).strip().splitlines()
        problem = f"a task does not run there ({why[-1] if why else type(error).__name__}): is this program installed?"
    gpus = float(node["Resources"].get("GPU", 0))
    return NodeAnswer(node=node["NodeID"], address=address, gpus=gpus, answer=answer, problem=problem)
