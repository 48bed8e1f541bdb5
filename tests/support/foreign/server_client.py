"""A small trainer of nobody's project that asks servers as AReaL's client does, and writes down what it was answered.

Its weights alternate between two models: each step asks for a greedy completion, pauses, writes the other model's
weights into a folder of their own, has every address load them, removes them, and continues. A line of `answers.jsonl`
says which model it should have been, what came, and every HTTP answer that was no 200.
"""

import argparse
import asyncio
import json
import os
import shutil
import time
from pathlib import Path

import aiohttp
from safetensors.torch import load_file, save_file


def write_weights(model: Path, folder: Path, *, is_other: bool) -> None:
    shutil.copytree(model, folder)
    if is_other:
        weights = load_file(model / "model.safetensors")
        save_file({name: tensor * 1.1 for name, tensor in weights.items()}, folder / "model.safetensors")


class Client:
    def __init__(self, session: aiohttp.ClientSession, addresses: list[str]) -> None:
        self.session = session
        self.addresses = addresses
        self.errors = []

    async def post(self, address: str, path: str, body: dict) -> dict:
        """As often as it takes; a client of AReaL's would give up after three."""
        while True:
            try:
                async with self.session.post(f"http://{address}{path}", json=body) as response:
                    if response.status == 200:
                        return await response.json()
                    self.errors.append(f"{path} {response.status} {(await response.text())[:200]}")
            except aiohttp.ClientError as error:
                self.errors.append(f"{path} {error!r}")
            await asyncio.sleep(0.2)

    async def everywhere(self, path: str, body: dict) -> None:
        await asyncio.gather(*(self.post(address, path, body) for address in self.addresses))

    async def healthy(self) -> None:
        for address in self.addresses:
            while True:
                async with self.session.get(f"http://{address}/health") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.1)

    async def generate(self, address: str, ids: list[int], tokens: int) -> dict:
        """Until it is complete: what was aborted is asked for again, from where it was."""
        made, logprobs, parts = [], [], 0
        while len(made) < tokens:
            sampling = {"temperature": 0.0, "max_new_tokens": tokens - len(made), "ignore_eos": True}
            body = {"input_ids": [*ids, *made], "sampling_params": sampling, "return_logprob": True, "stream": False}
            answer = await self.post(address, "/generate", {**body, "image_data": None})
            logprobs += [one[0] for one in answer["meta_info"]["output_token_logprobs"]]
            made += [one[1] for one in answer["meta_info"]["output_token_logprobs"]]
            parts += 1
        return {"tokens": made, "logprobs": logprobs, "parts": parts}


async def train(given: argparse.Namespace) -> None:
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = Client(session, os.environ[given.variable].split(","))
        await client.healthy()
        for step in range(1, given.steps + 1):
            began = time.monotonic()
            client.errors = []
            asked = [client.generate(a, given.prompt, given.tokens) for a in client.addresses for _ in range(given.n)]
            answers = await asyncio.gather(*asked)
            generated = time.monotonic()
            folder = given.out / f"weight_update_v{step}"
            await client.everywhere("/pause_generation", {})
            write_weights(given.model, folder, is_other=step % 2 == 1)
            before = time.monotonic()
            await client.everywhere(
                "/update_weights_from_disk", {"model_path": str(folder), "abort_all_requests": True}
            )
            updated = time.monotonic()
            shutil.rmtree(folder)
            await client.everywhere("/continue_generation", {})
            line = {
                "step": step,
                "is_other": step % 2 == 0,
                "answers": answers,
                "errors": client.errors,
                "generate_s": generated - began,
                "update_s": updated - before,
                "at": time.time(),
            }
            with (given.out / "answers.jsonl").open("a") as file:
                print(json.dumps(line), file=file)
            print(f"step {step} reward 0.5", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--variable", default="LLM_SERVER_ADDRS")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--n", type=int, default=2)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--prompt", type=json.loads, default=[19, 10, 20, 10, 19, 28])
    asyncio.run(train(parser.parse_args()))
