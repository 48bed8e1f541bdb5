"""The real SGLang on the CPU, as a server under test, and the log-probs that transformers gives for its completions."""

import asyncio
import dataclasses
import json
import os
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import aiohttp
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.processes.process_tree import Process
from actors.serving.server_incarnation import ServerHost, ServerSpec
from actors.serving.sglang_client import Sampling, SGLangClient
from actors.serving.sglang_server import SGLangProcess
from launcher.config.schema import GenerationConfig, SGLangConfig
from launcher.run_files.run_keys import ServerKeys
from tests.support.machine import scaled

MODEL = Path(__file__).parents[2] / "assets" / "arithmetic" / "model"
SAMPLING = Sampling.from_config(GenerationConfig(max_new_tokens=24))
deadline_s = partial(scaled, 300.0)
FLOAT32_NOISE = 2e-5
"""Between SGLang's log-probs and transformers' on the same tokens; one optimizer step moves them by 1e-3."""


class Serving:
    """A server, a client of it, and the loop that both live on."""

    def __init__(self, folder: Path, model: Path = MODEL, *, dtype: str = "float32") -> None:
        self.model = model
        config = SGLangConfig(dtype=dtype, device="cpu", max_total_tokens=20000, random_seed=1)
        self.log = folder / "llm_server-0.log"
        self.keys = ServerKeys.make(folder / "keys")
        spec = ServerSpec(index=0, config=config, log=self.log, keys=self.keys, setup_timeout_s=deadline_s())
        self._source = ServerHost(within_s=deadline_s())
        self.server = SGLangProcess(spec, owners=(os.getpid(),), host=self._source)
        self.loop = asyncio.Runner()
        self.version = 3
        self.generation = 0
        self.prompt = tuple(AutoTokenizer.from_pretrained(model)("4+5+4=").input_ids)

    def run(self, work):
        """`work(client)`, within a deadline."""

        async def inside():
            async with asyncio.timeout(deadline_s()), SGLangClient(ServerKeys.read_file(self.keys)) as client:
                return await work(client)

        return self.loop.run(inside())

    def start(self, *, generation: int = 0) -> None:
        async def work(_):
            await self.server.start(generation=generation, model_path=str(self.model), weight_version=self.version)
            await self.server.wait_ready()

        with mock.patch.dict(os.environ):
            os.environ.pop("PYTEST_CURRENT_TEST", None)  # each test's is another, and so would each host be
            self.run(work)

    @property
    def forked_of(self) -> Process | None:
        """Its host; None where it was run as a program."""
        return self._source._host._identity if self._source._host and self._source._forks else None

    @property
    def url(self) -> str:
        return self.server.info().url

    def generate(self, **changes):
        sampling = dataclasses.replace(SAMPLING, **changes)
        return self.run(
            lambda client: client.generate(self.url, token_ids=self.prompt, sampling=sampling, timeout_s=deadline_s())
        )

    async def continue_(self, client, progress, stream):
        """What is missing of a prompt's completions, in parts of eight tokens."""
        inputs, samplings = progress.request()
        return await client.generate_samples(
            self.url, stream, inputs=inputs, samplings=samplings, timeout_s=deadline_s(), stream_interval=8
        )

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def refuses(self, path: str, key: str = "") -> bool:
        """Whether SGLang answers 401 to a request with this key."""
        body = {"input_ids": list(self.prompt), "model_path": str(MODEL), "weight_version": "66", "mode": "abort"}
        headers = {"Authorization": f"Bearer {key}"} if key else {}

        async def work(_):
            async with (
                aiohttp.ClientSession() as session,
                session.post(self.url + path, json=body, headers=headers) as got,
            ):
                return got.status == 401

        return self.run(work)


def logprobs(weights, prompt, completion, temperature):
    """Of the completion's tokens, by transformers, from logits divided by the temperature."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits.double() / temperature, -1)
    return chosen.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def furthest(serving, completion, weights=None, temperature=1.0):
    weights = load_file(MODEL / "model.safetensors") if weights is None else weights
    said = torch.tensor(completion.logprobs, dtype=torch.float64)
    return (logprobs(weights, serving.prompt, completion, temperature) - said).abs().max().item()


def assert_serves(serving, weights, version):
    completion = serving.generate()
    assert completion.weight_version == version
    assert furthest(serving, completion, weights) < FLOAT32_NOISE
    assert furthest(serving, completion) > 100 * FLOAT32_NOISE, "the first weights would look the same"
    said = serving.run(lambda client: client.model_info(serving.url, timeout_s=deadline_s()))
    assert said.weight_version == version


def changed_weights(factor):
    return {name: tensor * factor for name, tensor in load_file(MODEL / "model.safetensors").items()}


def folder_of(weights, folder):
    shutil.copytree(MODEL, folder)
    save_file(weights, folder / "model.safetensors")
    return folder


def endless():
    """Sampling that nobody waits for the end of. min_new_tokens masks the tokenizer's end token and those that are
    named; a model's other end tokens it lets through."""
    ends = tuple(json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"])
    return dataclasses.replace(SAMPLING, max_new_tokens=900, min_new_tokens=900, stop_token_ids=ends)


async def order(client, url, path, body=None):
    """An endpoint that only tests use."""
    await client._answer("POST", url, path, deadline_s(), body or {}, admin=True)


async def running(client, url, request):
    """Until the server says that it is decoding."""
    before = (await client.metrics(url, timeout_s=deadline_s()))["sglang:realtime_tokens_total"]
    while (await client.metrics(url, timeout_s=deadline_s()))["sglang:realtime_tokens_total"] == before:
        assert not request.done()
