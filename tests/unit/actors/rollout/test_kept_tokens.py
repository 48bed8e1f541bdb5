"""What a server had sent of a completion when it died or left is continued by another, and counted."""

import asyncio
import contextlib
import dataclasses

import pytest

from actors.rollout import request_loop
from actors.serving.completions import CompletionStream
from tests.programs import stand_in_server
from tests.support.ready_servers import ready
from tests.support.replay import prompts
from tests.support.worlds.rollout import QUICK, SAMPLING, engine, queue_of


class Watched(CompletionStream):
    """Knows when a part of each completion has arrived."""

    parts = 0

    def feed(self, data):
        super().feed(data)
        Watched.parts += data.count(b"output_ids")


@pytest.mark.parametrize("how", ["dies", "leaves"])
async def test_a_completion_is_continued_from_the_tokens_that_a_server_had_sent(how, monkeypatch):
    monkeypatch.setattr(request_loop, "CompletionStream", Watched)
    monkeypatch.setattr(Watched, "parts", 0)
    items = prompts(1)
    longer = dataclasses.replace(SAMPLING, max_new_tokens=40, min_new_tokens=40)
    config = dataclasses.replace(QUICK, stream_interval=4)
    with stand_in_server.running("--weight-version", "0") as second, contextlib.ExitStack() as stack:
        slow = stand_in_server.running("--weight-version", "0", "--seconds-per-token", "0.05")
        url = stack.enter_context(slow)
        other = ready(second, 1, name="other")
        async with engine([url], config=config) as (rollouts, pool):
            wanted = {"n_samples": 3, "sampling": longer, "weight_version": 0, "concurrent_prompts": 1}
            running = asyncio.create_task(rollouts.collect_batch(queue_of(items), items, want=1, **wanted))
            while Watched.parts < 3:
                await asyncio.sleep(0.01)
            await pool.update([other])
            if how == "dies":
                stack.close()
            else:
                await pool.drain("server-0", within_s=0)
            batch, lost = await running, url
    assert [len(r.completion.token_ids) for r in batch.rollouts] == [40] * 3
    assert {r.completion.server for r in batch.rollouts} == {f"{lost} {second}"}
    assert batch.kept_tokens >= 3 * 4
    assert batch.generated_tokens == 3 * 40
    assert batch.retried == (how == "dies")
