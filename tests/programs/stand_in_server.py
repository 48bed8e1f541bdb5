"""SGLang's endpoints without a model, for fast tests: `python -m tests.programs.stand_in_server --port N [SGLang
arguments]`.

Completions are a function of the prompt's token ids and `sampling_seed`; without a seed, of how often that prompt was
asked before. Weight updates check that the folder has a config.json, as far as SGLang does.

Faults are switched on over HTTP (stand_in/faults.py). `GET /stand_in/state` tells what was asked.

With `--truthful` it loads the model and its log-probs are those of the weights that it holds, at any temperature; so
what asks whether a server has the right weights gets a true answer.

With `--out-of-memory-above N` or `--too-small-below N` it ends at its start where `--max-total-tokens` is more or less.
With `--bytes-per-token N` it takes the memory of its token pool, and ends as it comes where there is too little.

Started by a run it takes the run's keys as SGLang behind our auth middleware does
(`actors/serving/auth_middleware.py`): what forgets to send them gets 401. Only `/stand_in/*` stays open. By hand,
without GRPO_SERVER_KEYS, everything is.

`running(...)` starts one as a process and waits until it listens. With `--tree` it has a child, and a daemon of its
own session that ignores SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from aiohttp import web

from actors.serving.auth_middleware import VARIABLE, opens
from launcher.run_files.run_keys import ServerKeys
from tests.programs.stand_in.faults import StandInFaults
from tests.programs.stand_in.groups import StandInGroups
from tests.programs.stand_in.start import fits_or_exits, start_tree, take_pool
from tests.support.truthful_model import TruthfulModel

FORKS = multiprocessing.get_context("forkserver")
"""Python and the imports take half a second of a processor: one process has them, and each stand-in is a fork of it."""
FORKS.set_forkserver_preload(["tests.programs.stand_in_server"])


@contextlib.contextmanager
def running(*arguments: str, keys: Path | None = None) -> Iterator[str]:
    """The url of a stand-in on a free port, as a process that ends with the block. `keys`: the file of its keys."""
    reading, writing = FORKS.Pipe(duplex=False)
    environment = os.environ | ({} if keys is None else {VARIABLE: str(keys)})
    process = FORKS.Process(target=_run, args=(arguments, environment, writing), daemon=True)
    process.start()
    writing.close()  # else its end would not be read
    try:
        with open(reading.fileno(), closefd=False) as output:
            listening = output.readline()  # or its end, where it can't start
        assert listening.startswith("listening on "), "the stand-in did not start"
        yield f"http://127.0.0.1:{listening.split()[-1]}"
    finally:
        process.kill()
        process.join()
        reading.close()


def _run(arguments: tuple[str, ...], environment: dict[str, str], output: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), sys.stdout.fileno())
    output.close()
    sys.argv[1:] = ["--port", "0", *arguments]
    main()


class StandIn(StandInFaults):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(compiles_s=arguments.compiles_s)
        self.model_path = arguments.model_path
        self.weight_version = arguments.weight_version
        self.seconds_per_token = arguments.seconds_per_token
        self.vocab_size = vocab_size(Path(arguments.model_path))
        self.prompts: Counter[tuple[int, ...]] = Counter()
        self.in_flight = 0
        self.aborts = asyncio.Event()
        self.running = asyncio.Event()
        self.running.set()
        self.groups = StandInGroups()
        self.keys = ServerKeys.read_file(Path(os.environ[VARIABLE])) if VARIABLE in os.environ else None
        self.truthful = arguments.truthful
        self.chatty = arguments.chatty
        self.model = TruthfulModel(Path(self.model_path)) if self.truthful else None

    # ── SGLang's endpoints ──

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.chatty:
            print("generate", request.path, len(body["input_ids"]), flush=True)
        await self.running.wait()
        if body.get("stream"):
            return await self.stream(request, body)
        if body["input_ids"] and isinstance(body["input_ids"][0], list):
            asked = (self.one(prompt, body["sampling_params"]) for prompt in body["input_ids"])
            return web.json_response(await asyncio.gather(*asked))
        return web.json_response(await self.one(body["input_ids"], body["sampling_params"]))

    async def stream(self, request: web.Request, body: dict) -> web.StreamResponse:
        """Each completion in parts of the stream interval. Cut in the middle where that is the fault."""
        inputs, parameters = body["input_ids"], body["sampling_params"]
        asked = list(zip(inputs, parameters, strict=True)) if isinstance(parameters, list) else [(inputs, parameters)]
        events: asyncio.Queue[dict] = asyncio.Queue()
        makers = [asyncio.create_task(self.parts(events, index, *one)) for index, one in enumerate(asked)]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        while sent < len(asked):
            part = await events.get()
            answer = event(part)
            if part["meta_info"]["finish_reason"] is not None:
                if request.get("cut") and sent == len(asked) // 2:
                    await response.write(answer[: len(answer) // 2])
                    assert request.transport is not None
                    request.transport.close()
                    raise asyncio.CancelledError
                sent += 1
            await response.write(answer)
        await asyncio.gather(*makers)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def parts(self, events: asyncio.Queue[dict], index: int, prompt: list[int], parameters: dict) -> None:
        """Its events, each with the tokens since the one before, as with --incremental-streaming-output."""
        interval, begun = -parameters["stream_interval"], 0

        async def part(answer: dict) -> None:
            nonlocal begun
            tokens, meta = answer["output_ids"][begun:], answer["meta_info"]
            if "output_token_logprobs" in meta:
                meta = {**meta, "output_token_logprobs": meta["output_token_logprobs"][begun:]}
            begun += len(tokens)
            await events.put({"index": index, "output_ids": tokens, "meta_info": meta})

        await part(await self.one(prompt, parameters, each=(interval, part)))

    async def one(self, token_ids: list[int], parameters: dict, *, each=None) -> dict:
        """A whole answer. `each`: a number of tokens, and what is called with the answer so far after as many."""
        self.compile(parameters)
        prompt = tuple(token_ids)
        seed = parameters.get("sampling_seed", self.prompts[prompt])
        self.prompts[prompt] += 1
        tokens, logprobs = self.complete(prompt, seed, parameters)
        finish = "length" if len(tokens) == parameters["max_new_tokens"] else "stop"
        version = self.weight_version
        if self.seconds_per_token:
            self.in_flight += 1
            aborted, made = False, 0
            while not aborted and made < len(tokens):
                step = min(each[0] if each else len(tokens), len(tokens) - made)
                aborted = await self.aborted_within(self.seconds_per_token * step)
                made += step
                if each and not aborted and made < len(tokens):
                    await self.running.wait()
                    await each[1](self.answer(tokens[:made], logprobs[:made], None, version))
            self.in_flight -= 1
            if aborted:
                tokens, logprobs, finish = tokens[:1], logprobs[:1], "abort"
        return self.answer(tokens, logprobs, finish, version)

    def complete(self, prompt, seed, parameters) -> tuple[list[int], list[float]]:
        draw = random.Random(hashlib.sha256(repr((prompt, seed)).encode()).digest())
        longest = parameters["max_new_tokens"]
        length = draw.randint(max(1, min(parameters["min_new_tokens"], longest)), longest)
        tokens = [draw.randrange(2, self.vocab_size) for _ in range(length)]
        if self.model is not None:
            return tokens, self.model.logprobs(prompt, tokens)
        return tokens, [-3 * draw.random() for _ in tokens]

    def answer(self, tokens, logprobs, finish, version) -> dict:
        meta = {
            "finish_reason": finish and {"type": finish},
            "weight_version": version,
            "completion_tokens": len(tokens),
            "output_token_logprobs": [[lp, token, None] for lp, token in zip(logprobs, tokens, strict=True)],
        }
        answer = {"text": "".join(chr(97 + token % 26) for token in tokens), "output_ids": tokens, "meta_info": meta}
        match self.take_fault("/generate", {"empty", "no_logprobs", "nan_logprobs", "short_logprobs", "no_version"}):
            case "empty":
                answer |= {"text": "", "output_ids": []}
                meta["output_token_logprobs"] = []
            case "no_logprobs":
                del meta["output_token_logprobs"]
            case "nan_logprobs":
                meta["output_token_logprobs"][0][0] = None  # as SGLang's JSON encoder writes a NaN
            case "short_logprobs":
                meta["output_token_logprobs"].pop()
            case "no_version":
                del meta["weight_version"]
        return answer

    async def aborted_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.aborts.wait()
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> None:
        self.aborts.set()
        self.aborts = asyncio.Event()

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model_path, "weight_version": self.weight_version})

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model_path, "weight_version": self.weight_version, "tp_size": 1})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        served = sum(self.prompts.values())
        return web.Response(
            text=f'# TYPE sglang:num_requests_total counter\nsglang:num_requests_total{{a="b"}} {served}.0\n'
            f"sglang:num_running_reqs {self.in_flight}.0\nsglang:num_queue_reqs 0.0\nsglang:token_usage 0.25\n"
        )

    async def update_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["abort_all_requests"]:
            self.abort_all()
        if not (Path(body["model_path"]) / "config.json").is_file():
            return web.json_response({"success": False, "message": "no config.json"}, status=400)
        self.model_path = body["model_path"]
        if self.truthful:
            self.model = TruthfulModel(Path(self.model_path))
        return self.updated(body)

    async def update_from_tensor(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["abort_all_requests"]:
            self.abort_all()
        return self.updated(body)

    async def update_from_distributed(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["abort_all_requests"]:
            self.abort_all()
        refused = await self.groups.update(body)
        return self.updated(body) if refused is None else refused

    def updated(self, body: dict) -> web.Response:
        if self.in_flight and body["flush_cache"]:
            sys.exit("Cache flush failed after updating weights")  # as SGLang, whose requests leave a step later
        if self.take_fault("update", {"forget_version"}) is None:
            self.weight_version = body.get("weight_version") or self.weight_version
        return web.json_response({"success": True, "message": "Succeeded"})

    async def pause(self, request: web.Request) -> web.Response:
        if (await request.json())["mode"] == "abort":
            self.abort_all()
        self.running.clear()
        return web.json_response({"status": "ok"})

    async def resume(self, _: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({"status": "ok"})

    async def flush_cache(self, _: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")

    async def state(self, _: web.Request) -> web.Response:
        return web.json_response({"asked": self.asked, "fault": self.fault, "weight_version": self.weight_version})

    @web.middleware
    async def check_key(self, request: web.Request, handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if self.keys is None or request.path.startswith("/stand_in/") or opens(given, request.path, self.keys):
            return await handler(request)
        return web.json_response({"error": "Unauthorized"}, status=401)

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self.check_key, self.misbehave], client_max_size=2**30)
        application.add_routes(
            [
                web.post("/generate", self.generate),
                web.get("/model_info", self.model_info),
                web.get("/server_info", self.server_info),
                web.get("/health", self.health),
                web.get("/health_generate", self.health),
                web.get("/metrics/", self.metrics),
                web.post("/update_weights_from_disk", self.update_from_disk),
                web.post("/update_weights_from_tensor", self.update_from_tensor),
                web.post("/init_weights_update_group", self.groups.join),
                web.post("/update_weights_from_distributed", self.update_from_distributed),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.resume),
                web.post("/flush_cache", self.flush_cache),
                web.post("/stand_in/fault", self.set_fault),
                web.get("/stand_in/state", self.state),
                web.get("/stand_in/received", self.groups.told),
            ]
        )
        return application


def event(answer: dict) -> bytes:
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


def vocab_size(model_path: Path) -> int:
    config = model_path / "config.json"
    return json.loads(config.read_text())["vocab_size"] if config.is_file() else 100


async def serve(arguments: argparse.Namespace) -> None:
    stand_in = StandIn(arguments)
    runner = web.AppRunner(stand_in.application(), access_log=None)
    await runner.setup()
    stand_in.site = web.TCPSite(runner, arguments.host, arguments.port, reuse_address=True)
    await stand_in.site.start()
    print(f"listening on {runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-path", default="")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--seconds-per-token", type=float, default=0.0)
    parser.add_argument("--truthful", action="store_true")
    parser.add_argument("--chatty", action="store_true", help="a line for each request, as SGLang prints")
    parser.add_argument("--compiles-s", type=float, default=0.0, help="once, at its first use of top_p or top_k")
    parser.add_argument("--tree", action="store_true")
    parser.add_argument("--die-at-start", action="store_true")
    parser.add_argument("--max-total-tokens", type=int, default=0)
    parser.add_argument("--out-of-memory-above", type=int)
    parser.add_argument("--too-small-below", type=int)
    parser.add_argument("--bytes-per-token", type=int, default=0)
    arguments, _ = parser.parse_known_args()
    fits_or_exits(arguments)
    if arguments.bytes_per_token:
        take_pool(arguments)
    if arguments.die_at_start:
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", flush=True)
        sys.exit(9)
    if arguments.tree:
        start_tree()
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
