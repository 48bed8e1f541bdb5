"""An SGLang in miniature, in this process: each token follows from all before it, so that what is continued elsewhere
shows nothing of where it was cut."""

import asyncio

import orjson
from aiohttp import web

from launcher.base.messages import ServerInfo, ServerState


def next_token(ids):
    return (31 * sum(ids) + 7 * len(ids)) % 997


def completion(ids, n):
    made = []
    while len(made) < n:
        made.append(next_token([*ids, *made]))
    return made


class CountingServer:
    """`token_s`: of each token. `kill` breaks every connection and refuses further ones. `generated`: tokens so far."""

    def __init__(self, name="server-0", *, generation=0, version=0, token_s=0.0):
        self.name = name
        self.generation = generation
        self.version = version
        self.token_s = token_s
        self.asked = []
        self.bodies = []
        self.loaded = []
        self.authorizations = {}
        self.load_s = 0.0
        self.shift = 0.0  # of its log-probs
        self.status = 200  # of its answers to requests; another one is a failure
        self.says = None  # in place of an answer, with 200
        self.breaks_after = None  # so many tokens of a stream, with an error as its next event
        self.generated = 0
        self.aborts = asyncio.Event()
        self.in_flight = 0
        self.runner = None
        self.url = ""

    async def __aenter__(self):
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self.kill()

    async def kill(self):
        for connection in list(self.runner.server.connections if self.runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()
        await self.runner.cleanup()

    def info(self, state=ServerState.READY):
        index = int(self.name.rpartition("-")[2])
        facts = {"weight_version": self.version, "lineage": 1, "url": self.url, "pid": 1}
        return ServerInfo(name=self.name, index=index, generation=self.generation, state=state, **facts)

    async def answer(self, request):
        self.asked.append(request.path)
        self.authorizations[request.path] = request.headers.get("Authorization")
        body = orjson.loads(await request.read() or b"{}")
        self.bodies.append(body)
        match request.path:
            case "/generate":
                return await self.generate(request, body)
            case "/abort_request":
                self.aborts.set()
                self.aborts = asyncio.Event()
            case "/model_info":
                return web.json_response({"model_path": "m", "weight_version": str(self.version)})
            case "/update_weights_from_disk":
                await asyncio.sleep(self.load_s)
                self.loaded.append(body["model_path"])
                self.version = int(body["weight_version"])
                return web.json_response({"success": True, "message": "Succeeded"})
        return web.Response(text=f"{self.name} {request.path}")

    async def generate(self, request, body):
        ids, most = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        if self.status != 200:
            return web.json_response({"error": {"message": f"{self.name} is broken"}}, status=self.status)
        if self.says is not None:
            return web.Response(body=self.says)
        if most > 500:
            return web.json_response({"error": {"message": "too many"}}, status=400)
        aborts, made, begun = self.aborts, [], 0
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if body.get("stream"):
            await stream.prepare(request)
        self.in_flight += 1
        try:
            for number, token in enumerate(completion(ids, most), 1):
                await asyncio.sleep(self.token_s)
                made.append(token)
                self.generated += 1
                finish = {"type": "length", "length": most} if number == most else None
                finish = {"type": "abort", "message": "Aborted"} if aborts.is_set() and finish is None else finish
                if body.get("stream"):
                    await stream.write(
                        b"data: " + orjson.dumps(self.event(ids, made[begun:], number, finish)) + b"\n\n"
                    )
                    begun = number
                if finish is not None:
                    break
                if number == self.breaks_after:
                    said = {"error": {"code": 500, "message": f"{self.name} is broken"}}
                    await stream.write(b"data: " + orjson.dumps(said) + b"\n\n")
                    return stream
        finally:
            self.in_flight -= 1
        if not body.get("stream"):
            return web.json_response(self.event(ids, made, len(made), finish))
        await stream.write(b"data: [DONE]\n\n")
        return stream

    def event(self, ids, tokens, total, finish):
        meta = {
            "id": f"{self.name}-{self.generation}",
            "finish_reason": finish,
            "prompt_tokens": len(ids),
            "weight_version": str(self.version),
            "completion_tokens": total,
            "cached_tokens": 0,
            "output_token_logprobs": [[-token / 1000 - self.shift, token, None] for token in tokens],
            "output_token_logprobs_length": total,
        }
        return {"text": "".join(f"<{token}>" for token in tokens), "output_ids": list(tokens), "meta_info": meta}
