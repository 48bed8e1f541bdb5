"""`python -m launcher doctor [address=…]`: what this machine has and lacks for a run, and the command that repairs it.

The checks are those that a run makes before it starts. With the address of a Ray cluster they are asked on each of its
nodes. What depends on a run's settings (data, models, memory, ports) is shown by the run's own command with
`dry_run=true`.

Exit codes: 0 runs on a GPU can start, and those on the CPU; 4 only runs on the CPU; 2 neither, or a wrong command.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence

from rich import box
from rich.table import Table

from launcher.base.errors import LauncherError, ResourceError, UsageError
from launcher.base.findings import Finding, Severity
from launcher.reporting.terminal_text import as_far_as_it_is_read, console_of_width
from launcher.resources.node_checks import check_node

COMMAND = "doctor"
USAGE = f"usage: python -m launcher {COMMAND} [address=auto|<ip:port of a Ray cluster>]"
WIDTH = 120
"""Where the output is no terminal."""
GPU_AND_CPU, CPU_ONLY, NEITHER = 0, 4, 2


def run(arguments: Sequence[str]) -> int:
    """Print a table for this machine, or for each node of a cluster; the exit code is of the worst of them. Raises
    ResourceError where it can't be printed."""
    address = arguments[0].removeprefix("address=") if arguments else ""
    if {"-h", "--help"} & set(arguments):
        with as_far_as_it_is_read():
            print(f"{__doc__}\n{USAGE}")
        return GPU_AND_CPU
    if len(arguments) > 1 or (arguments and not arguments[0].startswith("address=")):
        print(f"error: {' '.join(arguments)} can't be understood\n  → {USAGE}", file=sys.stderr)
        return NEITHER
    try:
        asked = {"this machine": check_node()} if not address else _of_cluster(address)
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return NEITHER
    codes = [_code_of(checks) for checks in asked.values()]
    with as_far_as_it_is_read():
        for node, checks in asked.items():
            _show(node, checks)
    return NEITHER if NEITHER in codes else max(codes)


def _of_cluster(address: str) -> dict[str, Sequence[Finding]]:
    """Raises LauncherError where the cluster, or one of its nodes, does not answer."""
    import ray

    from actors.cluster.node_readiness import ask_nodes
    from actors.cluster.ray_cluster import RAY_ENVIRONMENT

    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray's own are many, and bare
        raise ResourceError(
            f"no Ray cluster at address={address}: {error}",
            "have its RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH here too (docs/clusters.md)",
        ) from error
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        answers = ask_nodes()
    if silent := [f"{one.address}: {one.problem}" for one in answers if one.problem]:
        raise UsageError("; ".join(f"node {line}" for line in silent), "is this program installed on every node?")
    return {f"node {one.address}": one.answer for one in answers}


def _code_of(checks: Sequence[Finding]) -> int:
    stopped = {check.level for check in checks}
    return NEITHER if Severity.BAD in stopped else CPU_ONLY if Severity.GPU in stopped else GPU_AND_CPU


def _show(node: str, checks: Sequence[Finding]) -> None:
    """The table, and what follows from it."""
    console = console_of_width(WIDTH)
    table = Table(title=node, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in ("", "what", "seen", "remedy"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(_mark(check), check.subject, check.text, check.hint)
    console.print(table)
    stopped = {stops: [check.subject for check in checks if check.level is stops] for stops in Severity}
    on_cpu, on_gpu = stopped[Severity.BAD], [*stopped[Severity.BAD], *stopped[Severity.GPU]]
    unknown = stopped[Severity.UNKNOWN]
    limit = ", as far as is known" if unknown else ""  # what is not known is of GPUs alone
    for what, because, limited in (("a run on the CPU", on_cpu, ""), ("a run on a GPU", on_gpu, limit)):
        no = f"{what} can't start: {', '.join(dict.fromkeys(because))}"
        console.print(no if because else f"{what} can start{limited}")
    if unknown:
        console.print(f"not known: {', '.join(dict.fromkeys(unknown))}")
    for stops in (Severity.SHARED, Severity.SEVERAL):
        if stopped[stops] and not on_gpu:
            console.print(f"but not {stops}: {', '.join(dict.fromkeys(stopped[stops]))}")


def _mark(check: Finding) -> str:
    return "missing" if check.stops else str(check.level)
