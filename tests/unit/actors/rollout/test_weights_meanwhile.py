"""Weights change while completions are made: what a server has sent is continued on the new ones, each token once."""

import asyncio
import dataclasses
import json

from actors.rollout.rollout_engine import RolloutEngine
from actors.serving.sglang_client import SGLangClient
from actors.weights.weight_folders import FolderTransport, WeightFolders
from actors.weights.weight_publisher import WeightPublisher
from launcher.config.schema import RolloutConfig
from tests.programs import stand_in_server
from tests.support.machine import scaled
from tests.support.ready_servers import pool_of
from tests.support.replay import prompts
from tests.support.worlds.rollout import SAMPLING, EveryoneIsRight, queue_of

CONFIG = RolloutConfig(stream_interval=2, hedge_after_s=None, request_retries=0)
LONG = dataclasses.replace(SAMPLING, max_new_tokens=60, min_new_tokens=60, seed=5)
WANT = 2


def export(folder):
    (folder / "config.json").write_text(json.dumps({"vocab_size": 60}))
    (folder / "model.safetensors").write_bytes(b"weights")


async def batches(url, root, *, finish_s):
    """The batch of step 0, and that of step 1, which is made at two versions."""
    async with asyncio.timeout(scaled(60.0)), SGLangClient() as client:
        pool = await pool_of([url])
        folders = FolderTransport(client, WeightFolders(root / "weights", export), timeout_s=scaled(20.0))
        publisher = WeightPublisher(pool, folders, finish_s=finish_s)
        engine = RolloutEngine(
            client=client, pool=pool, scorer=EveryoneIsRight(), config=CONFIG, decode=lambda ids: [str(i) for i in ids]
        )
        items = prompts(8)
        queue = queue_of(items)
        stream = engine.stream(
            queue,
            items,
            n_samples=2,
            sampling=LONG,
            concurrent_prompts=WANT,
            ahead=1,
            newest=lambda: publisher.version or 0,
        )
        first = await stream.next_batch(WANT, version=0)
        queue.commit(first.prompt_ids)
        while not any(live.first_s is not None for live in engine._loop._live.values()):
            await asyncio.sleep(0.01)
        await publisher.publish(1)
        assert pool.servers()[0].weight_version == 1
        second = await stream.next_batch(WANT, version=1)
        await stream.close()
        await publisher.close()
        return first, second


def test_requests_in_flight_move_on_and_say_which_weights_made_how_many_tokens(tmp_path):
    with stand_in_server.running("--weight-version", "0", "--seconds-per-token", "0.01") as url:
        first, second = asyncio.run(batches(url, tmp_path, finish_s=0.0))
    assert first.weight_versions == (0,)
    assert second.weight_versions == (0, 1)
    for rollout in second.rollouts:
        made = rollout.completion
        assert sum(tokens for _, tokens in made.runs) == len(made.token_ids) == len(made.logprobs) == 60
        assert [version for version, _ in made.runs] in ([0, 1], [1])
    assert second.kept_tokens > 0, "moving on is no failed attempt"
    assert second.retried == 0, "moving on is no failed attempt"


def test_requests_in_flight_that_finish_in_time_are_not_moved(tmp_path):
    with stand_in_server.running("--weight-version", "0", "--seconds-per-token", "0.01") as url:
        _, second = asyncio.run(batches(url, tmp_path, finish_s=scaled(20.0)))
    assert {rollout.completion.runs for rollout in second.rollouts} == {((0, 60),)}, "the weights waited for them"
    assert second.kept_tokens == 0
