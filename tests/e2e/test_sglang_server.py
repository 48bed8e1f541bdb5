"""The real SGLang on the CPU, in its host: one server for all tests here, restarted twice.

Each test leaves it READY at a version that it says itself.
"""

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from actors.processes.process_tree import descendants, identify, name, open_files
from actors.rollout.request_loop import GroupProgress
from actors.serving.completions import CompletionStream
from actors.serving.server_incarnation import SHARED_MEMORY
from actors.serving.sglang_client import RequestFailed
from actors.serving.weight_buckets import in_buckets
from launcher.base.errors import WeightsRefused
from launcher.base.messages import ServerState
from launcher.base.rollouts import Completion
from launcher.run_files.run_keys import ServerKeys
from tests.support.real_server import (
    FLOAT32_NOISE,
    MODEL,
    SAMPLING,
    Serving,
    assert_serves,
    changed_weights,
    deadline_s,
    endless,
    folder_of,
    furthest,
    order,
    running,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

FARTHEST_OF_MANY = 5 * FLOAT32_NOISE
"""Of what 256 at once draw, one may be an outlier: one was at 3.7e-5, the farthest of 333 others at 1.5e-5."""
GONE = RequestFailed("the test asks", kind="reset")


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    serving = Serving(tmp_path_factory.mktemp("serving"))
    serving.start()
    yield serving
    serving.run(lambda _: serving.server.close())
    serving.loop.close()


# ── generation ──


def test_it_is_ready_at_the_version_it_was_started_with(serving):
    info = serving.server.info()
    assert (info.state, info.weight_version, info.generation) == (ServerState.READY, 3, 0)
    assert serving.generate().weight_version == 3


@pytest.mark.parametrize(
    ("sampling", "temperature"),
    [
        ({"temperature": 1.0}, 1.0),
        ({"temperature": 0.6}, 0.6),
        ({"temperature": 1.6}, 1.6),
        ({"temperature": 0.6, "top_p": 0.5, "top_k": 5}, 0.6),
        ({"temperature": 0.0}, 1.0),
    ],
)
def test_logprobs_are_at_the_sampling_temperature_over_all_tokens(serving, sampling, temperature):
    completion = serving.generate(**sampling)
    assert furthest(serving, completion, temperature=temperature) < FLOAT32_NOISE
    if temperature != 1.0:
        assert furthest(serving, completion, temperature=1.0) > 100 * FLOAT32_NOISE


def test_a_completion_ends_with_its_end_token_or_at_its_length(serving):
    stopped = serving.generate(temperature=0.0)
    assert stopped.finish_reason == "stop"
    eos = AutoTokenizer.from_pretrained(MODEL).eos_token_id
    assert stopped.token_ids[-1] == eos
    cut = serving.generate(temperature=0.0, max_new_tokens=2)
    assert (cut.finish_reason, cut.token_ids) == ("length", stopped.token_ids[:2])


def test_many_at_once(serving):
    sampling = dataclasses.replace(SAMPLING, temperature=1.3)

    async def work(client):
        return await asyncio.gather(
            *(
                client.generate(serving.url, token_ids=serving.prompt, sampling=sampling, timeout_s=deadline_s())
                for _ in range(256)
            )
        )

    completions = {completion.token_ids: completion for completion in serving.run(work)}
    assert len(completions) > 10
    assert len({len(token_ids) for token_ids in completions}) > 2, "requests of one length tell nothing of padding"
    of_each_length = sorted(completions.values(), key=lambda completion: len(completion.token_ids))
    *others, farthest = sorted(
        furthest(serving, completion, temperature=1.3) for completion in of_each_length[:: len(completions) // 8]
    )
    assert max(others) < FLOAT32_NOISE
    assert farthest < FARTHEST_OF_MANY


def test_a_prompt_that_is_too_long_is_the_requests_own_fault(serving):
    async def work(client):
        await client.generate(serving.url, token_ids=[5] * 100_000, sampling=SAMPLING, timeout_s=deadline_s())

    with pytest.raises(RequestFailed, match="longer than the model's context length") as caught:
        serving.run(work)
    assert (caught.value.kind, caught.value.retryable) == ("http_4xx", False)
    serving.generate()


# ── weights ──


def test_weights_from_disk(serving, tmp_path):
    weights, version = changed_weights(1.05), serving.next_version()
    folder = folder_of(weights, tmp_path / "weights")
    serving.run(
        lambda client: client.update_weights_from_disk(
            serving.url, path=folder, weight_version=version, timeout_s=deadline_s()
        )
    )
    assert_serves(serving, weights, version)


@pytest.mark.parametrize("most_bytes", [2**30, 2**17])
def test_weights_from_tensors(serving, most_bytes):
    """In one bucket, and in several."""
    weights, version = changed_weights(0.95 if most_bytes > 2**20 else 0.9), serving.next_version()
    buckets = in_buckets(weights.items(), most_bytes=most_bytes)
    assert (len(buckets) == 1) == (most_bytes > 2**20)
    serving.run(
        lambda client: client.update_weights_from_tensor(
            serving.url, buckets=buckets, weight_version=version, timeout_s=deadline_s()
        )
    )
    assert_serves(serving, weights, version)


def test_an_update_from_nowhere_is_refused_and_changes_nothing(serving, tmp_path):
    async def work(client):
        await client.update_weights_from_disk(
            serving.url, path=tmp_path / "none", weight_version=999, timeout_s=deadline_s()
        )

    with pytest.raises(WeightsRefused, match="weight version 999"):
        serving.run(work)
    assert serving.generate().weight_version == serving.version


def test_requests_in_flight_are_aborted_by_an_update_and_the_server_lives(serving):
    """Again and again: a cache flush within the update killed it when the aborted request was still in its batch."""

    async def work(client, version):
        together = [  # so many that none can end before the update comes
            asyncio.create_task(
                client.generate(serving.url, token_ids=serving.prompt, sampling=endless(), timeout_s=deadline_s())
            )
            for _ in range(16)
        ]
        await running(client, serving.url, together[0])
        await client.update_weights_from_tensor(
            serving.url,
            buckets=in_buckets(changed_weights(1.0).items()),
            weight_version=version,
            timeout_s=deadline_s(),
        )
        answers = await asyncio.gather(*together, return_exceptions=True)
        late = [answer for answer in answers if isinstance(answer, Completion)]  # came when the rest was aborted
        assert {answer.weight_version for answer in late} <= {version}
        return {(type(answer), answer.kind, answer.retryable) for answer in answers if answer not in late}

    for _ in range(10):
        version = serving.next_version()
        told = serving.run(lambda client, version=version: work(client, version))
        assert told == {(RequestFailed, "aborted", True)}
    assert serving.generate().weight_version == version


def test_pause_and_continue(serving):
    async def work(client):
        await order(client, serving.url, "/pause_generation", {"mode": "abort"})
        waiting = asyncio.create_task(
            client.generate(serving.url, token_ids=serving.prompt, sampling=SAMPLING, timeout_s=deadline_s())
        )
        await client.model_info(serving.url, timeout_s=deadline_s())
        assert not waiting.done()
        await order(client, serving.url, "/continue_generation")
        await waiting
        await client.flush_cache(serving.url, timeout_s=deadline_s())
        assert await client.health(serving.url, timeout_s=deadline_s())
        return await client.metrics(serving.url, timeout_s=deadline_s())

    assert serving.run(work)["sglang:generation_tokens_total"] > 0


# ── its keys ──


def test_without_its_keys_it_refuses_and_it_shows_them_nowhere(serving):
    keys = ServerKeys.read_file(serving.keys)
    questions = ("/generate", "/model_info", "/server_info", "/health", "/health_generate", "/metrics/", "/v1/models")
    orders = (
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/pause_generation",
        "/flush_cache",
        "/nothing",
    )
    assert [path for path in (*questions, *orders, "/", "/docs") if not serving.refuses(path)] == []
    assert [path for path in (*questions, *orders) if not serving.refuses(path, "0" * 64)] == []
    assert [path for path in orders if not serving.refuses(path, keys.api)] == []
    assert not serving.refuses("/generate", keys.api)
    assert not serving.refuses("/flush_cache", keys.admin)
    assert serving.generate().weight_version == serving.version, "no refused update was made"

    async def said(client):
        return json.dumps(await client._json("GET", serving.url, "/server_info", deadline_s()), default=str)

    process = identify(serving.server.info().pid)
    tree = [process, *descendants(process.pid)]
    shown = {"/server_info": serving.run(said).encode(), "its log": serving.log.read_bytes()}
    shown |= {
        f"{name(one)} ({one.pid})/{part}": text
        for one in tree
        for part in ("cmdline", "environ")
        if (text := read_of(one, part))
    }
    assert len(shown) >= 2 + 2 * 3, "three processes at least were read, both parts of each"
    assert all(shown.values()), "three processes at least were read, both parts of each"
    assert [where for where, text in shown.items() if keys.api.encode() in text or keys.admin.encode() in text] == []


def read_of(process, part):
    """Empty where it has ended since it was found."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process.pid}/{part}").read_bytes()
    return b""


def connections_of(process):
    """None where it has ended since it was found."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.net_connections("inet")
    return []


def test_it_listens_on_loopback_alone(serving):
    head = psutil.Process(serving.server.info().pid)
    listening = {
        connection.laddr.ip
        for process in (head, *head.children(recursive=True))
        for connection in connections_of(process)
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_a_pickle_among_the_weights_is_not_run(serving, tmp_path):
    mark = tmp_path / "it ran"
    torch.load(io.BytesIO(pickled(Bomb(mark))), weights_only=False)
    assert mark.exists(), "the bomb works"
    mark.unlink()
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickled(Bomb(mark)))
    with pytest.raises(WeightsRefused):
        serving.run(
            lambda client: client.update_weights_from_disk(
                serving.url, path=folder, weight_version=99, timeout_s=deadline_s()
            )
        )
    assert not mark.exists()
    assert serving.generate().weight_version == serving.version, "and the server lives"


def pickled(thing):
    buffer = io.BytesIO()
    torch.save({"weight": thing}, buffer)
    return buffer.getvalue()


def test_a_dead_scheduler_is_reported_at_once_and_a_new_incarnation_continues_its_completion(serving):
    """From the token at which it was cut, with the tokens and the log-probs of the unbroken one."""
    greedy = dataclasses.replace(endless(), temperature=0.0)
    stream = CompletionStream(1, server=serving.url)
    version = serving.next_version()
    progress = GroupProgress(serving.prompt, [greedy], version)
    first = serving.server.info()
    tree = [identify(first.pid), *descendants(first.pid)]
    scheduler = next(process for process in tree if name(process).startswith("sglang::sched"))
    shared_memory = set(open_files(scheduler.pid, SHARED_MEMORY))
    assert shared_memory

    async def work(client):
        await client.update_weights_from_disk(serving.url, path=MODEL, weight_version=version, timeout_s=deadline_s())
        waiting = asyncio.create_task(serving.continue_(client, progress, stream))
        while not stream.samples(GONE).begun:
            await asyncio.sleep(0)
            assert not waiting.done()
        os.kill(scheduler.pid, signal.SIGKILL)
        exit_ = await serving.server.wait_exit()
        return exit_, await waiting

    exit_, samples = serving.run(work)
    assert samples.failure.kind in {"reset", "truncated"}
    assert f"its sglang::schedul (pid {scheduler.pid}) is gone" in exit_.reason
    assert serving.server.info().state is ServerState.DEAD
    serving.start(generation=1)
    second = serving.server.info()
    assert (second.generation, second.weight_version, second.state) == (1, version, ServerState.READY)
    assert [process for process in tree if identify(process.pid) == process] == []
    assert not any(path.exists() for path in shared_memory)
    assert furthest(serving, serving.generate()) < FLOAT32_NOISE
    begun = samples.begun[0]
    assert 8 <= len(begun.token_ids) < greedy.max_new_tokens
    progress.take_samples(samples)
    again = CompletionStream(1, server=serving.url)
    progress.take_samples(serving.run(lambda client: serving.continue_(client, progress, again)))
    (continued,) = progress.completions()
    unbroken = serving.generate(**dataclasses.asdict(greedy))
    assert continued.token_ids == unbroken.token_ids
    assert continued.logprobs == pytest.approx(unbroken.logprobs, abs=FLOAT32_NOISE)


def test_a_server_that_is_forked_again_after_a_sigkill_says_what_it_said(serving):
    """And it is of the same host: only an exec draws the random addresses of a process's auxv anew."""
    version = serving.next_version()
    serving.run(
        lambda client: client.update_weights_from_disk(
            serving.url, path=MODEL, weight_version=version, timeout_s=deadline_s()
        )
    )
    greedy = dataclasses.asdict(dataclasses.replace(endless(), temperature=0.0))
    host, first = serving.forked_of, serving.server.info()
    said = serving.generate(**greedy)
    os.kill(first.pid, signal.SIGKILL)
    serving.run(lambda _: serving.server.wait_exit())
    serving.start(generation=first.generation + 1)
    second = serving.server.info()
    assert (second.state, second.weight_version) == (ServerState.READY, version)
    assert second.pid not in (first.pid, host.pid)
    assert serving.forked_of == host == identify(host.pid)
    auxv = [Path(f"/proc/{pid}/auxv").read_bytes() for pid in (host.pid, second.pid, os.getpid())]
    assert auxv[0] == auxv[1] != auxv[2]
    again = serving.generate(**greedy)
    assert len(said.token_ids) == greedy["max_new_tokens"]
    assert again.token_ids == said.token_ids
    assert again.logprobs == pytest.approx(said.logprobs, abs=1e-5)
