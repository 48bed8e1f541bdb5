"""Where agents ask the model: OpenAI's chat completions on 127.0.0.1, with a key that opens one episode only.

    POST /v1/chat/completions   whole, or as a stream of one event
    GET /v1/models              a name; a request may use any

An agent never sees the servers or their keys. A request whose episode is over gets 401.
"""

from __future__ import annotations

import json
import secrets

from aiohttp import web

from actors.episodes.chat_request import BadRequest, ChatAnswer, ChatRequest
from actors.episodes.episode import Episode
from launcher.base.errors import LauncherError

MODEL = "policy"
MOST_BYTES = 64 * 2**20


class EpisodeDoor:
    """Used on one asyncio loop; `start` before `url`."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None)
        self.url = ""

    async def start(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        await self._runner.cleanup()

    def open(self, episode: Episode) -> str:
        """Its key."""
        key = secrets.token_urlsafe(24)
        self._episodes[key] = episode
        return key

    def shut(self, key: str) -> None:
        self._episodes.pop(key).close()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        episode = self._episodes.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if episode is None:
            return _error(401, "no episode has this key, or it is over")
        try:
            asked = ChatRequest.of(await request.json())
            answer = await episode.answer(asked)
        except (BadRequest, json.JSONDecodeError) as error:
            return _error(400, str(error))
        except LauncherError as error:
            return _error(503, error.message)
        model = asked.model or MODEL
        return await _streamed(request, answer, model) if asked.is_streamed else web.json_response(answer.body(model))


async def _streamed(request: web.Request, answer: ChatAnswer, model: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in answer.events(model):
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def _error(status: int, message: str) -> web.Response:
    """`x-should-retry`: OpenAI's clients would ask again, and the door has tried already."""
    body = {"error": {"message": message, "type": "episode", "param": None, "code": None}}
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})
