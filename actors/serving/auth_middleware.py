"""Authorization in front of an SGLang server's HTTP application: an ASGI middleware that checks keys.

SGLang 0.5.17's own keys (`--api-key`, `--admin-api-key`) are not used: they show in the command line, in the log and in
the answer of /server_info, and with them /health* (which generates), /metrics* and web sockets stay open. Here only
this object knows the keys, and every endpoint that is not listed for the API key needs the admin key.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from launcher.base.addresses import is_every_interface
from launcher.base.errors import LauncherError
from launcher.resources.sglang_arguments import BYPASSES
from launcher.run_files.run_keys import ServerKeys

VARIABLE = "GRPO_SERVER_KEYS"
"""Names the file of the keys: the environment holds its path, not the secret."""
API_PATHS = frozenset(
    {
        *("/generate", "/model_info", "/get_model_info", "/server_info", "/get_server_info"),
        *("/health", "/health_generate", "/metrics", "/metrics/"),
        *("/v1/models", "/v1/completions", "/v1/chat/completions"),
    }
)
REFUSAL = b'{"error":"Unauthorized"}'

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def opens(authorization: bytes, path: str, keys: ServerKeys) -> bool:
    """Whether this header lets its sender through to `path`. Compared in constant time."""
    kind, _, given = authorization.partition(b" ")
    if kind.lower() != b"bearer":
        return False
    is_admin = secrets.compare_digest(given, keys.admin.encode())
    is_user = secrets.compare_digest(given, keys.api.encode())
    return is_admin or (is_user and path in API_PATHS)


class AuthMiddleware:
    """An ASGI application in front of another. Web sockets are closed: nothing of ours uses one."""

    def __init__(self, app: Application, keys: ServerKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "lifespan":
                await self._app(scope, receive, send)
            case "http" if opens(_authorization(scope), scope["path"], self._keys):
                await self._app(scope, receive, send)
            case "http":
                headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(REFUSAL))]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": REFUSAL})
            case _:
                await send({"type": "websocket.close", "code": 1008})


def _authorization(scope: Scope) -> bytes:
    given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    return given[0] if len(given) == 1 else b""


def protect(app: Any) -> None:
    """Add the middleware to a Starlette application before it starts. Exits where there are no keys."""
    app.add_middleware(AuthMiddleware, keys=keys_or_exit())


def keys_or_exit() -> ServerKeys:
    """The keys of the file that the environment names. Exits where there are none: no server may be open."""
    try:
        return ServerKeys.read_file(Path(os.environ[VARIABLE]))
    except KeyError:
        sys.exit(
            f"{VARIABLE} names no file of keys: no server is started open to everybody. By hand: "
            '`python -c "from pathlib import Path; from launcher.run_files.run_keys import ServerKeys; '
            "print(ServerKeys.make(Path('my_keys').absolute()))\"` makes one and prints its path"
        )
    except LauncherError as error:
        sys.exit(str(error))


def refuse_bypasses(server_args: Any) -> None:
    """Check the arguments as SGLang parsed them, abbreviations too. Exits where one would bypass the keys."""
    for name, (allowed, why) in BYPASSES.items():
        if getattr(server_args, name, allowed) != allowed:
            sys.exit(f"--{name.replace('_', '-')} is not allowed: {why} (sglang.extra_args)")
    if is_every_interface(server_args.host):
        sys.exit("--host would listen on every interface: set sglang.host to one address of this machine")
