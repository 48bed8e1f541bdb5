"""Who gets through a server's door, and which arguments would lead past it."""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from actors.serving.auth_middleware import API_PATHS, VARIABLE, AuthMiddleware, opens, refuse_bypasses
from launcher.base.addresses import is_every_interface
from launcher.resources.config_checks import find_problems
from launcher.resources.sglang_arguments import BYPASSES
from launcher.run_files.run_keys import ServerKeys
from tests.support.composed import composed

KEYS = ServerKeys(api="a" * 64, admin="b" * 64)
API, ADMIN = (f"Bearer {key}".encode() for key in (KEYS.api, KEYS.admin))
ADMIN_PATHS = ("/update_weights_from_disk", "/update_weights_from_tensor", "/pause_generation", "/flush_cache", "/x")


@pytest.mark.parametrize("path", sorted(API_PATHS))
def test_the_api_key_opens_generation_and_questions(path):
    assert opens(API, path, KEYS)
    assert opens(ADMIN, path, KEYS)


@pytest.mark.parametrize("path", ADMIN_PATHS)
def test_all_else_takes_the_admin_key(path):
    assert opens(ADMIN, path, KEYS)
    assert not opens(API, path, KEYS)


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer None",
        b"Basic " + b"b" * 64,
        b"b" * 64,
        ADMIN[:-1],
        ADMIN + b"b",
        ADMIN + b" ",
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/health_generate", "/metrics", "/flush_cache"])
def test_nothing_else_opens_anything(given, path):
    assert not opens(given, path, KEYS)


def ask(scope):
    """What a client gets from an application behind the door, and whether it was reached."""
    sent, reached = [], []

    async def app(scope, receive, send):
        reached.append(scope["type"])

    async def send(message):
        sent.append(message)

    asyncio.run(AuthMiddleware(app, KEYS)(scope, None, send))
    return sent, reached


def http(*headers, path="/generate"):
    return {"type": "http", "path": path, "headers": list(headers)}


def test_the_door_lets_in_whoever_has_the_key():
    assert ask(http((b"authorization", API))) == ([], ["http"])
    assert ask({"type": "lifespan"}) == ([], ["lifespan"])


@pytest.mark.parametrize("headers", [[], [(b"authorization", API), (b"authorization", ADMIN)], [(b"x", ADMIN)]])
def test_the_door_answers_strangers_itself(headers):
    sent, reached = ask(http(*headers, path="/flush_cache"))
    assert (sent[0]["status"], reached) == (401, [])
    assert sent[1]["body"] == b'{"error":"Unauthorized"}'


def test_web_sockets_are_closed_to_all():
    sent, reached = ask({"type": "websocket", "path": "/v1/realtime", "headers": [(b"authorization", ADMIN)]})
    assert (sent, reached) == ([{"type": "websocket.close", "code": 1008}], [])


# ── ways round it ──


def arguments(**changes):
    return SimpleNamespace(**({name: allowed for name, (allowed, _) in BYPASSES.items()} | {"host": "::1"} | changes))


def test_the_usual_arguments_are_no_way_round():
    refuse_bypasses(arguments())
    refuse_bypasses(SimpleNamespace(host="127.0.0.1"))  # an SGLang that lacks them


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"api_key": "SECRET"}, "--api-key is not allowed: it would stand in the process list"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num is not allowed"),
        ({"grpc_port": 5}, "gRPC knows no keys"),
        ({"enable_dp_attention": True}, "unpickle"),
        ({"enable_custom_logit_processor": True}, "unpickles code"),
        ({"host": "0.0.0.0"}, "every interface"),
    ],
)
def test_a_way_round_ends_the_process(changes, said):
    with pytest.raises(SystemExit, match=said) as caught:
        refuse_bypasses(arguments(**changes))
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("entry", ["actors.serving.sglang_cpu", "actors.serving.sglang_gpu"])
@pytest.mark.parametrize(("variable", "said"), [(None, "names no file of keys"), ("/nowhere", "is not there")])
def test_without_keys_no_server_starts(entry, variable, said):
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    if variable is not None:
        environment[VARIABLE] = variable
    done = subprocess.run(
        [sys.executable, "-m", entry, "--model-path", "x"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 1
    assert said in done.stderr


# ── known before anything starts ──

EVERYWHERE = ["0.0.0.0", "::", "[::]", "0", "0x0", "0.0", "*", "", " ", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"]


@pytest.mark.parametrize("host", EVERYWHERE)
def test_every_interface_by_any_name(host):
    assert is_every_interface(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "10.0.0.1", "node-7", "fe80::1%lo"])
def test_one_interface(host):
    assert not is_every_interface(host)


def problems(**sglang):
    config = composed("conf=arithmetic_cpu")
    for key, value in sglang.items():
        setattr(config.sglang, key, value)
    return [str(problem) for problem in find_problems(config) if problem.subject.startswith("sglang.")]


@pytest.mark.slow
@pytest.mark.parametrize("host", EVERYWHERE)
def test_a_host_that_is_every_interface_is_refused_by_its_key(host):
    (problem,) = problems(host=host)
    assert problem.startswith(f"sglang.host={host!r}: 127.0.0.1, or this machine's address")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"hos": "0.0.0.0"}, "sglang.extra_args.hos=0.0.0.0: one address, not every interface"),
        ({"api_key": "SECRET"}, "sglang.extra_args.api_key=(not shown): nothing: each run makes its own keys"),
        ({"admin-api-key": "SECRET"}, "sglang.extra_args.admin-api-key=(not shown)"),
    ],
)
def test_extra_arguments_that_open_a_door_are_refused_by_their_key(extra, said):
    (problem,) = problems(extra_args=extra)
    assert problem.startswith(said)
    assert "SECRET" not in problem


@pytest.mark.slow
def test_other_hosts_and_arguments_stand():
    assert problems(host="10.0.0.1", extra_args={"hos": "127.0.0.2", "watchdog_timeout": 60}) == []
