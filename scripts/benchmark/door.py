"""Benchmark `door`: processor time of the door for each request of another project's trainer, against a bare proxy.

    bare    the least that aiohttp can do between a client and a server: read, ask, answer
    door    actors/foreign, as a run has it
    other   the door of another checkout (`--against`), e.g. of a commit before

Each is a process of its own, on uvloop as Ray's actors are, before the same stand-in for a server, which answers at
once. They take turns; the processor time is the process's own, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from aiohttp import web

from actors.foreign.door_http import DoorHttp
from actors.foreign.door_requests import DoorRequests
from actors.foreign.door_servers import DoorServers
from actors.foreign.kept_weights import LINEAGE, KeptWeights
from actors.serving.completions import DONE, END, PREFIX
from launcher.base.messages import ServerInfo, ServerState
from launcher.config.compose import REPOSITORY
from launcher.config.schema import RunConfig
from launcher.run_files.run_keys import ServerKeys
from scripts.benchmark.measured import Measured, Points, paired_ratio
from scripts.benchmark.plain_clients import RawClient
from scripts.benchmark.server import cpu_seconds

HOST = "127.0.0.1"
KEYS = ServerKeys(api="a", admin="b")
BARE, DOOR, OTHER = "bare", "door", "other"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=10, help="in each, every one is asked once, in turn")
    parser.add_argument("--requests", type=int, default=1600, help="of one turn")
    parser.add_argument("--at-once", type=int, default=32, help="requests that are in flight at a time")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a completion")
    parser.add_argument("--against", type=Path, help="another checkout with this benchmark, whose door is asked too")


def run(arguments: argparse.Namespace) -> Measured:
    with ExitStack() as stack:
        _, server = _started(stack, "server")
        asked = {BARE: _started(stack, BARE, server), DOOR: _started(stack, DOOR, server)}
        if arguments.against is not None:
            asked[OTHER] = _started(stack, DOOR, server, checkout=arguments.against)
        points = uvloop.run(_rounds(arguments, asked))
    ratios = {f"{name} over {BARE}": paired_ratio(points[_point(name)], points[_point(BARE)]) for name in asked}
    if OTHER in asked:
        ratios[f"{DOOR} over {OTHER}"] = paired_ratio(points[_point(DOOR)], points[_point(OTHER)])
    del ratios[f"{BARE} over {BARE}"]
    return Measured(points=points, ratios=ratios)


def _point(name: str) -> str:
    return f"{name}_cpu_a_request_s"


def _started(stack: ExitStack, role: str, server: str = "", *, checkout: Path = REPOSITORY) -> tuple[int, str]:
    """A role of this module as a process: its pid and its url."""
    words = [sys.executable, "-m", "scripts.benchmark.door", role, server]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    process = stack.enter_context(
        subprocess.Popen(words, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    )
    stack.callback(process.terminate)
    assert process.stdout is not None
    if not (address := process.stdout.readline().strip()):
        raise RuntimeError(f"{role} of {checkout} did not start")
    return process.pid, f"http://{address}"


async def _rounds(arguments: argparse.Namespace, asked: dict[str, tuple[int, str]]) -> Points:
    sampling = {"max_new_tokens": arguments.tokens, "temperature": 1.0}
    prompts, points = [list(range(arguments.prompt))], Points()
    turns = max(1, arguments.requests // arguments.at_once)
    clients = {name: RawClient(KEYS.api) for name in asked}  # each has connections to one place
    try:
        for number in range(arguments.rounds + 1):
            for name, (pid, url) in asked.items():
                before = cpu_seconds(pid)
                for _ in range(turns):
                    tokens = await clients[name].one_by_one(url, prompts, arguments.at_once, sampling)
                    assert tokens == arguments.tokens * arguments.at_once
                used = cpu_seconds(pid) - before
                if number:  # the first one warms up
                    points.setdefault(_point(name), []).append(used / (turns * arguments.at_once))
    finally:
        for client in clients.values():
            await client.close()
    return points


# ── the processes ──


async def _serve(answer: Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]) -> str:
    application = web.Application(client_max_size=2**40)
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    return f"{HOST}:{runner.addresses[0][1]}"


async def _server(_: str) -> str:
    """Answers as SGLang does, at once: as a whole, or in parts of `stream_interval` tokens."""

    def answer(begin: int, end: int, most: int) -> bytes:
        meta = {
            "id": "0",
            "finish_reason": {"type": "length", "length": most} if end == most else None,
            "prompt_tokens": 1,
            "weight_version": "0",
            "completion_tokens": end,
            "cached_tokens": 0,
            "output_token_logprobs": [[-1.2345678, token, None] for token in range(begin, end)],
            "output_token_logprobs_length": end,
            "e2e_latency": 0.1,
        }
        return orjson.dumps({"text": "words " * (end - begin), "output_ids": [*range(begin, end)], "meta_info": meta})

    async def generate(request: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await request.read())
        most, step = (asked["sampling_params"].get(key, 0) for key in ("max_new_tokens", "stream_interval"))
        if not asked.get("stream"):
            return web.json_response(body=answer(0, most, most))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for begin in range(0, most, abs(step)):
            await stream.write(PREFIX + answer(begin, min(most, begin + abs(step)), most) + END)
        await stream.write(PREFIX + DONE + END)
        return stream

    return await _serve(generate)


async def _bare(server: str) -> str:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def pass_on(request: web.Request) -> web.StreamResponse:
        async with session.post(server + request.path, data=await request.read()) as response:
            body, kind = await response.read(), response.headers["Content-Type"]
            return web.Response(body=body, status=response.status, headers={"Content-Type": kind})

    return await _serve(pass_on)


async def _door(server: str) -> str:
    kept = KeptWeights(Path(tempfile.mkdtemp(prefix="benchmark-door-")) / "kept")
    config = RunConfig(experiment_name="door")
    servers = DoorServers(config, KEYS, kept)
    requests = DoorRequests(servers, config.rollout, paused=False)
    http = DoorHttp(servers, requests, kept, told=print)
    await http.open(HOST, 1)
    gc.freeze()  # as DoorActor
    ready = ServerInfo(name="server-0", index=0, generation=0, state=ServerState.READY, url=server, pid=os.getpid())
    await servers.pool.update([dataclasses.replace(ready, weight_version=kept.state.version, lineage=LINEAGE)])
    return http.addresses[0]


async def _main(role: str, server: str) -> None:
    print(await {"server": _server, BARE: _bare, DOOR: _door}[role](server), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_main(*sys.argv[1:]))
