"""The client against a real HTTP server: what is no whole, truthful completion never looks like one."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import pickle
import socket

import aiohttp
import pytest
import torch

from actors.serving import weight_buckets
from actors.serving.completions import completion_from
from actors.serving.sglang_client import NO_VERSION, RequestFailed, Sampling, SGLangClient
from actors.serving.weight_buckets import in_buckets
from launcher.base.errors import WeightsRefused
from launcher.config.schema import GenerationConfig
from tests.programs import stand_in_server
from tests.support.machine import scaled

SAMPLING = Sampling.from_config(GenerationConfig(max_new_tokens=6), stop_token_ids=(1,))


@pytest.fixture(scope="module")
def server():
    with stand_in_server.running("--weight-version", "3") as url:
        yield url


@contextlib.asynccontextmanager
async def client_of(url):
    """Faults left over from an earlier test are switched off first."""
    await post(url, {"kind": "none", "times": 0})
    async with SGLangClient() as client:
        yield client


async def order(client, url, path, body=None):
    """An endpoint that only these tests use."""
    await client._answer("POST", url, path, 30.0, body or {}, admin=True)


async def post(url, fault):
    async with aiohttp.ClientSession() as session, session.post(f"{url}/stand_in/fault", json=fault) as response:
        response.raise_for_status()


async def state(url):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/stand_in/state") as response:
        return await response.json()


def generate(client, url, *, token_ids=(5, 6, 7), sampling=SAMPLING, timeout_s=10.0):
    return client.generate(url, token_ids=token_ids, sampling=sampling, timeout_s=timeout_s)


async def kind_of_failure(call):
    try:
        await call
    except RequestFailed as failure:
        return failure.kind
    return ""


# ── completions ──


@pytest.mark.slow
async def test_a_completion_is_whole(server):
    async with client_of(server) as client:
        completion = await generate(client, server)
    assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 6
    assert completion.weight_version == 3
    assert completion.server == server
    assert completion.finish_reason == ("length" if len(completion.token_ids) == 6 else "stop")


async def test_a_seed_is_sent_and_makes_a_completion_reproducible(server):
    async with client_of(server) as client:
        seeded = [dataclasses.replace(SAMPLING, seed=seed) for seed in (1, 1, 2)]
        first, second, other = [(await generate(client, server, sampling=sampling)).token_ids for sampling in seeded]
    assert first == second != other


def test_the_parameters_are_sglangs():
    assert dataclasses.replace(SAMPLING, seed=4).parameters() == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 6,
        "min_new_tokens": 0,
        "stop_token_ids": (1,),
        "sampling_seed": 4,
    }


@pytest.mark.slow
async def test_256_requests_are_in_flight_together(server):
    """Each takes as long as the server says; a limit of 100 connections would make it three times that."""
    before, within_s = (await state(server))["asked"].get("/generate", 0), scaled(30)
    async with client_of(server) as client:
        await post(server, {"kind": "slow", "seconds": scaled(2.0), "times": None})
        waiting = [asyncio.create_task(generate(client, server, timeout_s=within_s)) for _ in range(256)]
        async with asyncio.timeout(within_s):
            while (await state(server))["asked"].get("/generate", 0) - before < 256:
                assert not any(task.done() for task in waiting), "some were answered before the last was asked"
        assert len(await asyncio.gather(*waiting)) == 256


# ── faults ──

FAULTS = [
    ("reset", "reset", True),
    ("500", "http_5xx", True),
    ("503", "http_5xx", True),
    ("400", "http_4xx", False),
    ("truncated", "truncated", True),
    ("not_json", "malformed", True),
    ("empty", "empty", True),
    ("no_logprobs", "malformed", True),
    ("nan_logprobs", "nonfinite", True),
    ("short_logprobs", "malformed", True),
    ("no_version", "malformed", True),
]


@pytest.mark.parametrize(("fault", "kind", "retryable"), FAULTS)
async def test_a_fault_is_a_failure_of_its_kind_and_the_next_request_is_served(server, fault, kind, retryable):
    async with client_of(server) as client:
        await post(server, {"kind": fault})
        with pytest.raises(RequestFailed) as caught:
            await generate(client, server)
        assert (await state(server))["fault"]["times"] == 0, "the fault did not fire"
        await generate(client, server)
        failure = caught.value
    assert (failure.kind, failure.retryable) == (kind, retryable)
    assert server in failure.message


async def test_a_deadline_ends_a_request(server):
    async with client_of(server) as client:
        await post(server, {"kind": "slow", "seconds": 60})
        with pytest.raises(RequestFailed, match=r"no answer within 0\.2 s") as caught:
            await generate(client, server, timeout_s=0.2)
        assert caught.value.kind == "timeout"


async def test_nobody_there_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(RequestFailed, match=url) as caught:
        async with SGLangClient() as client:
            await generate(client, url)
    assert (caught.value.kind, caught.value.retryable) == ("refused", True)


async def test_a_server_that_stops_listening_and_comes_back(server):
    async with client_of(server), asyncio.timeout(scaled(30)):
        await post(server, {"kind": "refuse", "seconds": scaled(0.5)})
        kinds = []
        while kinds[-2:] != ["refused", ""]:
            async with SGLangClient() as fresh:  # a connection made before would still be served
                kinds.append(await kind_of_failure(fresh.model_info(server, timeout_s=scaled(10))))


async def test_an_aborted_request_is_no_completion():
    with stand_in_server.running("--weight-version", "1", "--seconds-per-token", "100") as url:
        async with client_of(url) as client:
            waiting = asyncio.create_task(generate(client, url, timeout_s=60))
            async with asyncio.timeout(30):
                while not (await state(url))["asked"].get("/generate"):
                    pass
            await order(client, url, "/pause_generation", {"mode": "abort"})
            with pytest.raises(RequestFailed, match="aborted the request after 1 tokens") as caught:
                await waiting
            await order(client, url, "/continue_generation")
            failure = caught.value
    assert (failure.kind, failure.retryable) == ("aborted", True)


async def test_weights_can_be_updated_while_a_request_is_running(tmp_path):
    """A flush of the cache within the update would kill the server."""
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    with stand_in_server.running("--weight-version", "1", "--seconds-per-token", "100") as url:
        async with client_of(url) as client:
            waiting = asyncio.create_task(generate(client, url, timeout_s=60))
            async with asyncio.timeout(30):
                while not (await state(url))["asked"].get("/generate"):
                    pass
            await client.update_weights_from_disk(url, path=tmp_path, weight_version=2, timeout_s=10)
            with pytest.raises(RequestFailed, match="aborted"):
                await waiting
            after = await state(url)
    assert after["weight_version"] == "2"
    assert after["asked"]["/flush_cache"] == 1


ANSWER = {
    "output_ids": [4, 5],
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "weight_version": "7",
        "output_token_logprobs": [[-0.5, 4, None], [-0.25, 5, None]],
    },
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"output_token_logprobs": [[-0.5, 4, None], [-0.25, 6, None]]}, "or of other ones"),
        ({"output_token_logprobs": [[-0.5, 4, None], [math.nan, 5, None]]}, "not finite"),
        ({"output_token_logprobs": [[-0.5, 4, None], [-math.inf, 5, None]]}, "not finite"),
        ({"finish_reason": {"type": "whim"}}, "finish_reason 'whim'"),
        ({"finish_reason": None}, "TypeError"),
        ({"weight_version": "default"}, "default"),
        ({"weight_version": None}, "TypeError"),
    ],
)
def test_an_answer_that_contradicts_itself_is_malformed(change, said):
    with pytest.raises(RequestFailed, match=said) as caught:
        completion_from(ANSWER | {"meta_info": ANSWER["meta_info"] | change}, server="http://s")
    assert caught.value.kind == ("nonfinite" if said == "not finite" else "malformed")
    assert completion_from(ANSWER, server="http://s").logprobs == (-0.5, -0.25)


def test_labels_of_another_server_are_numbered_as_they_come_and_never_versions_of_ours():
    labels: dict[str, int] = {}

    def version(label, labels):
        answer = ANSWER | {"meta_info": ANSWER["meta_info"] | {"weight_version": label}}
        return completion_from(answer, server="http://s", labels=labels).weight_version

    assert [version(label, labels) for label in ("default", "7", "default", 7, None)] == [0, 1, 0, 1, 2]
    assert list(labels) == ["default", "7", "None"]
    assert version("7", None) == 7


def test_a_failure_survives_pickling():
    failure = pickle.loads(pickle.dumps(RequestFailed("it broke", "mend it", kind="reset", retryable=False)))
    assert (failure.message, failure.hint, failure.kind, failure.retryable) == ("it broke", "mend it", "reset", False)


# ── weights and questions ──


async def test_weights_are_confirmed_by_the_server(server, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    async with client_of(server) as client:
        await client.update_weights_from_disk(server, path=tmp_path, weight_version=4, timeout_s=10)
        first = await client.model_info(server, timeout_s=10)
        buckets = in_buckets([("w", torch.ones(3))])
        await client.update_weights_from_tensor(server, buckets=buckets, weight_version=5, timeout_s=10)
        second, completion = await client.model_info(server, timeout_s=10), await generate(client, server)
    assert (first.weight_version, first.model_path) == (4, str(tmp_path))
    assert second.weight_version == completion.weight_version == 5


async def test_a_bucket_is_one_request_with_a_handle_for_each_rank_and_the_last_brings_the_version(monkeypatch):
    asked, numbers, paths = [], itertools.count(), []
    monkeypatch.setattr(weight_buckets, "handle_of", lambda bucket: f"{bucket.names[0]}{next(numbers)}")

    async def answer(_, url, path, timeout_s, body=None, **rest):
        paths.append(path.partition("?")[0])
        if body:
            assert path == "/update_weights_from_tensor"
            assert body["load_format"] == "flattened_bucket"
            assert body["abort_all_requests"]
            assert not body["flush_cache"]
            asked.append((body["serialized_named_tensors"], body["weight_version"]))
        return json.dumps({"model_path": "m", "weight_version": asked[-1][1]}).encode()

    buckets = in_buckets([("a", torch.ones(3)), ("b", torch.ones(3))], most_bytes=12)
    async with SGLangClient() as client:
        monkeypatch.setattr(client, "_answer", answer)
        await client.update_weights_from_tensor("s", buckets=buckets, weight_version=5, timeout_s=10, tp_size=2)
    assert asked == [(["a0", "a1"], NO_VERSION), (["b2", "b3"], "5")]
    assert paths == ["/update_weights_from_tensor"] * 2 + ["/model_info", "/flush_cache"]


async def test_weights_that_the_server_does_not_take_are_refused(server, tmp_path):
    async with client_of(server) as client:
        with pytest.raises(WeightsRefused, match=r"weight version 9: .*HTTP 400 .*no config\.json"):
            await client.update_weights_from_disk(server, path=tmp_path / "none", weight_version=9, timeout_s=10)


async def test_weights_that_the_server_takes_and_does_not_hold_are_refused(server, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    async with client_of(server) as client:
        await client.update_weights_from_disk(server, path=tmp_path, weight_version=11, timeout_s=10)
        await post(server, {"kind": "forget_version", "path": "update"})
        with pytest.raises(WeightsRefused, match="then reported that it holds version 11"):
            await client.update_weights_from_disk(server, path=tmp_path, weight_version=12, timeout_s=10)


async def test_a_server_that_dies_of_an_update_has_not_refused_it(server, tmp_path):
    """The publisher must see a lost server, not a wrong folder."""
    async with client_of(server) as client:
        await post(server, {"kind": "reset", "path": "/update_weights_from_disk"})
        with pytest.raises(RequestFailed) as caught:
            await client.update_weights_from_disk(server, path=tmp_path, weight_version=9, timeout_s=10)
        assert caught.value.kind == "reset"


@pytest.mark.slow
async def test_a_server_without_a_version_of_ours_says_none():
    with stand_in_server.running() as url:
        async with client_of(url) as client:
            assert (await client.model_info(url, timeout_s=10)).weight_version is None


async def test_health_metrics_and_cache(server):
    async with client_of(server) as client:
        await post(server, {"kind": "503", "path": "/health"})
        sick, well = [await client.health(server, timeout_s=10) for _ in range(2)]
        await client.flush_cache(server, timeout_s=10)
        before = (await client.metrics(server, timeout_s=10))["sglang:num_requests_total"]
        await generate(client, server)
        after = (await client.metrics(server, timeout_s=10))["sglang:num_requests_total"]
        info = await client._json("GET", server, "/server_info", 10)
    assert (sick, well, after - before) == (False, True, 1.0)
    assert info["tp_size"] == 1
