"""Agents for episodes on stand-in servers, whose answers are never calls of a tool."""

import asyncio
import hashlib
import math
import os
import time
from pathlib import Path


def points(text):
    return float(hashlib.sha256(text.encode()).digest()[0] % 2)


async def two_turns(record, client):
    """Asks, says something to the answer, asks again."""
    messages = [{"role": "user", "content": record["question"]}]
    first = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
    messages += [first.model_dump(), {"role": "user", "content": "and now?"}]
    second = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
    return {"first": points(first.content), "second": points(second.content)}


async def branches(record, client):
    """Three answers to one question, side by side, and a history that was edited."""
    asked = [{"role": "user", "content": record["question"]}]
    create = client.chat.completions.create
    answers = await asyncio.gather(*(create(model="m", messages=asked) for _ in range(3)))
    edited = {"role": "assistant", "content": answers[0].choices[0].message.content + " (in short)"}
    await create(model="m", messages=[*asked, edited, {"role": "user", "content": "so?"}])
    return 1.0


class Agent:
    """In AReaL's form: a client of its own."""

    async def run(self, data, **given):
        answer = await given["http_client"].post(
            given["base_url"] + "/chat/completions",
            json={"messages": [{"role": "user", "content": data["question"]}], "max_tokens": 2},
            headers={"Authorization": f"Bearer {given['api_key']}"},
        )
        return points(answer.json()["choices"][0]["message"]["content"])


async def names_its_process(record, client):
    messages = [{"role": "user", "content": record["question"]}]
    await client.chat.completions.create(model="m", messages=messages)
    return {"pid": float(os.getpid())}


async def endless_turns(record, client):
    while True:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "again"}])


async def asks_nothing(record):
    return 1.0


async def sleeps(record):
    await asyncio.sleep(3600)


async def hangs(record):
    time.sleep(3600)


async def raises(record):
    raise KeyError("spoon")


async def silent(record, client):
    await two_turns(record, client)


async def not_a_number(record, client):
    await two_turns(record, client)
    return math.nan


async def out_of_order(record, client):
    await client.chat.completions.create(model="m", messages=[{"role": "assistant", "content": "first"}])


async def dies_once(record, client):
    """Its process ends at the first try of the first question."""
    if not Path(record["flag"]).exists():
        Path(record["flag"]).touch()
        os._exit(9)
    return await two_turns(record, client)


async def fails_between(record, client):
    """Once, after the first of two answers, in the way that the record says. 1 where the next try got that one too."""
    messages = [{"role": "user", "content": record["question"]}]
    first = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
    said = Path(record["flag"])
    if not said.exists():
        said.write_text(first.content)
        record["dies"] and os._exit(9)
        raise KeyError("spoon")
    messages += [first.model_dump(), {"role": "user", "content": "and now?"}]
    await client.chat.completions.create(model="m", messages=messages)
    return float(said.read_text() == first.content)


async def ends_its_process(record, client):
    """Of the first question; the others go on once that has happened."""
    if record["question"] == "0+1=?":
        await asyncio.sleep(0.1)
        os._exit(9)
    return await two_turns(record, client)


async def blocks(record, client):
    """The first question's episodes."""
    if record["question"] == "0+1=?":
        time.sleep(3600)
    return await two_turns(record, client)


async def blocks_in_a_task(record):
    await asyncio.create_task(hangs(record))


async def cancels_itself(record):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def is_cancelled(record):
    raise asyncio.CancelledError


async def closes(record, client, http_client):
    async with client:
        points_of_two = await two_turns(record, client)
    await http_client.aclose()
    return points_of_two


async def fifty_at_once(record, client):
    asked = [{"role": "user", "content": record["question"]}]
    said = await asyncio.gather(*(client.chat.completions.create(model="m", messages=asked) for _ in range(15)))
    return float(sum(bool(one.usage.completion_tokens) for one in said))


async def overdue_once(record, client):
    """It takes longer than its time the first time."""
    if not Path(record["flag"]).exists():
        Path(record["flag"]).touch()
        await asyncio.sleep(3600)
    return await two_turns(record, client)


KEPT = []


async def keeps(record, client):
    """Of each episode 50 MB, and the process that played it."""
    KEPT.append(b"x" * 50_000_000)
    await two_turns(record, client)
    return {"process": os.getpid()}


async def loads(record, client):
    """100 MB, once in each process."""
    KEPT or KEPT.append(b"x" * 100_000_000)
    await two_turns(record, client)
    return {"process": os.getpid()}


def not_async(record):
    return 1.0


async def too_many(record, surprise):
    return 1.0
