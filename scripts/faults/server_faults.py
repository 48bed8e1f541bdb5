"""Faults of servers: killed, stopped, without memory, slow, with wrong weights, or busy for another client."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator

from actors.processes.process_tree import Process
from scripts.faults import server_api, signals
from scripts.faults.declaration import (
    PART,
    SERVER,
    SO_LONG,
    UNTIL_REPLACED,
    FaultContext,
    Figures,
    Option,
    fault,
    is_alive,
    seconds,
    setting,
)
from scripts.faults.memory_faults import limited
from scripts.faults.signals import Missed
from scripts.run_processes import LiveServer

MIB = 2**20
PUBLISH_LOOK_S = 0.005


@fault("C1", "server crashes: SIGKILL", role="server", part=PART, server=SERVER)
def kill_server(context: FaultContext) -> Figures:
    server = context.server()
    part, processes = context.part(server)
    return {"target": server.name, "part": part, **signals.kill(processes)}


@fault("C2", "server hangs: SIGSTOP", role="server", part=PART, server=SERVER, seconds=UNTIL_REPLACED)
def stop_server(context: FaultContext) -> Figures:
    server = context.server()
    part, processes = context.part(server)
    return {"target": server.name, "part": part, **signals.hold(processes, context.number("seconds"), context.sleep)}


@fault(
    "C3",
    "server out of memory: RLIMIT_AS of its scheduler, then requests that need more",
    role="server",
    server=SERVER,
    headroom_mib=Option(0.0, "above the address space that it has now"),
    seconds=seconds(60.0, "for so long requests are sent"),
)
def starve_server(context: FaultContext) -> Figures:
    server = context.server()
    process = scheduler(server)[0]
    with limited(process, resource.RLIMIT_AS, "VmSize") as limit:
        limit_bytes = limit(int(context.number("headroom_mib") * MIB))
        sent = _keep_busy(context, server, process, tokens=64, together=16, prompt=128)
    if is_alive(process):
        raise Missed(f"{server.name} survived its limit of {limit_bytes} bytes", "give it less: headroom_mib=0")
    return {"target": server.name, "pids": [process.pid], "limit_bytes": limit_bytes, "requests": sent}


@fault(
    "C5",
    "stale weights: a server is made to load those that the run began with",
    role="server",
    server=SERVER,
    label=Option("false", "true: it says the old version; false: it still says the new one", ("true", "false")),
)
def load_stale_weights(context: FaultContext) -> Figures:
    server = context.server()
    first = str(setting(context.paths, "sglang.model_path"))
    with _just_published(context, server) as said:
        version = "0" if context.word("label") == "true" else said
        at = time.monotonic()
        server_api.load_weights(server.url, first, context.keys, version=version)
    done = {"loaded": first, "weight_version": said, "labelled": version, "signalled_monotonic": at}
    return {"target": server.name, **done}


@contextlib.contextmanager
def _just_published(context: FaultContext, server: LiveServer) -> Iterator[str]:
    """Right after the next publish, with the trainer stopped: the weight version that the server says.

    At any other time the next publish would replace what is loaded before a token came from it.
    """
    before = server_api.weight_version(server.url, context.keys)
    deadline = time.monotonic() + context.within_s
    while (said := server_api.weight_version(server.url, context.keys)) == before:
        if time.monotonic() > deadline:
            raise Missed(f"{server.name} got no new weights in time", "give it longer with --within")
        context.sleep(PUBLISH_LOOK_S)
    with signals.stopped([context.trainer()]):
        yield said


@fault("C7", "every server dies at once: SIGKILL of all their trees", role="server")
def kill_all_servers(context: FaultContext) -> Figures:
    trees = [process for server in context.found.servers for process in server.tree]
    return {"target": ", ".join(server.name for server in context.found.servers), **signals.kill(trees)}


@fault("X-none", "trap: nothing is done, which a benchmark of alarms needs")
def do_nothing(context: FaultContext) -> Figures:
    return {"target": "nothing"}


@fault(
    "X-long",
    "trap: long generations of a stranger keep a server busy",
    role="server",
    server=SERVER,
    tokens=Option(200.0, "of each", least=1),
    together=Option(8.0, "requests at once", least=1),
    seconds=seconds(20.0, SO_LONG),
)
def long_generations(context: FaultContext) -> Figures:
    server = context.server()
    tokens, together = int(context.number("tokens")), int(context.number("together"))
    sent = _keep_busy(context, server, server.http, tokens=tokens, together=together, prompt=8)
    return {"target": server.name, "requests": sent}


def scheduler(server: LiveServer) -> tuple[Process, ...]:
    """What makes the tokens: the scheduler, or where a server has none of that name, all of it."""
    return server.part("scheduler") or server.tree


def _keep_busy(
    context: FaultContext, server: LiveServer, process: Process, *, tokens: int, together: int, prompt: int
) -> int:
    return server_api.keep_busy(
        server.url,
        context.keys,
        tokens=tokens,
        together=together,
        prompt=prompt,
        until=time.monotonic() + context.number("seconds"),
        alive=lambda: is_alive(process),
    )
