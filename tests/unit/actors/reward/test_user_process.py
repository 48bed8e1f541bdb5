"""A process of the user's code: what it is asked while it ends, reads nothing, or nobody waits for the answer."""

import asyncio
import contextlib
import os
import signal

import pytest

from actors.reward.user_process import ProcessGone, UserProcess
from launcher.base.errors import RewardError
from tests.support.machine import scaled
from tests.support.worlds.episodes import config_of
from tests.support.worlds.reward import config

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def started():
    """Starts processes that are closed with the test."""
    processes = []

    async def start(setting, **more):
        processes.append(UserProcess(setting, **more))
        await processes[-1].ready()
        return processes[-1]

    yield start
    for process in processes:
        await process.close()


@pytest.fixture
def episodes(started):
    async def start():
        return await started(config_of("two_turns").reward, episode="tests.support.episodes.agents:two_turns")

    return start


async def told(asked):
    async with asyncio.timeout(scaled(30)):
        await asked.done
    return [answer["value"] for answer in asked.answers]


async def test_what_is_asked_of_a_process_that_has_ended_is_told_that_it_is_gone(episodes):
    process = await episodes()
    await process.close()
    with pytest.raises(ProcessGone, match="before it was asked"):
        await told(process.ask({"prompt_id": "p0"}))
    assert not await process.is_awake(scaled(30))


async def test_a_process_that_reads_nothing_keeps_nobody_waiting(episodes):
    """A message that fills the line was written on a thread of its own, with a deadline of its own."""
    process = await episodes()
    os.kill(process.pid, signal.SIGSTOP)
    asked = process.ask({"record": "x" * 2**22})
    assert not await process.is_awake(0.1)
    process.kill()
    with pytest.raises(ProcessGone, match="killed by SIGKILL"):
        await told(asked)


async def test_all_that_a_process_was_asked_ends_with_it(episodes):
    process = await episodes()
    os.kill(process.pid, signal.SIGSTOP)
    all_asked = [process.ask({"prompt_id": "p0"}) for _ in range(3)]
    os.kill(process.pid, signal.SIGKILL)
    for asked in all_asked:
        with pytest.raises(ProcessGone, match="killed by SIGKILL"):
            await told(asked)
    assert process.is_gone


async def test_two_orders_at_once_have_each_its_own_answers(started, tmp_path, monkeypatch):
    (tmp_path / "echoes.py").write_text("def score(*, completion, **_): return float(completion)\n")
    monkeypatch.syspath_prepend(tmp_path)
    process = await started(config("echoes:score"))
    known = {"answer": "", "prompt_id": "p", "record": {}, "token_ids": [], "finish_reason": "stop", "group": []}
    items = [{"completion": str(number), **known} for number in range(4)]
    orders = [process.ask({"items": items[start : start + 2]}, 2) for start in (0, 2)]
    assert [await told(asked) for asked in orders] == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize("apart", ["os.getpid", "os.setsid"])
async def test_the_end_is_noticed_though_a_process_that_it_forked_holds_the_line_open(
    started, tmp_path, monkeypatch, apart
):
    """Its completions waited for reward.timeout, and were said to be late; an episode waited for ever."""
    forks = f"""
import os, time
def score(*, completion, **_):
    if completion == "first":
        return 1.0
    child = os.fork()
    if child:
        open({str(tmp_path / "child")!r}, "w").write(str(child))
        os._exit(7)
    {apart}()
    time.sleep(1000)
"""
    (tmp_path / "forks.py").write_text(forks)
    monkeypatch.syspath_prepend(tmp_path)
    process = await started(config("forks:score"))
    item = {"answer": "", "prompt_id": "p", "record": {}, "token_ids": [], "finish_reason": "stop", "group": []}
    asked = process.ask({"items": [{"completion": "first", **item}, {"completion": "forks", **item}]}, 2)
    try:
        with pytest.raises(ProcessGone, match="exit code 7"):
            await told(asked)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert [answer["value"] for answer in asked.answers] == [1.0]


async def test_a_process_that_a_signal_without_a_name_ended_is_gone(episodes):
    """Its end raised ValueError in asyncio's callback: what it was asked, and its close, waited for ever."""
    process = await episodes()
    os.kill(process.pid, signal.SIGSTOP)
    asked = process.ask({"prompt_id": "p0"})
    os.kill(process.pid, signal.SIGRTMIN + 6)
    os.kill(process.pid, signal.SIGCONT)
    with pytest.raises(ProcessGone, match=f"killed by signal {signal.SIGRTMIN + 6}"):
        await told(asked)


class Unreadable:
    """Pickled as a call that raises where it is unpickled."""

    def __reduce__(self):
        return int, ("no number",)


async def test_a_record_that_can_not_be_sent_is_refused_and_leaves_no_work_behind(started, tmp_path, monkeypatch):
    """It stayed in the process's list of orders, which no answer ever took out: the process seemed busy for ever, and
    one that had grown was never replaced."""
    (tmp_path / "lengths.py").write_text("def score(*, completion, **_): return len(completion)\n")
    monkeypatch.syspath_prepend(tmp_path)
    process = await started(config("lengths:score"))
    item = {"completion": "ab", "answer": "", "prompt_id": "p", "token_ids": [], "finish_reason": "stop", "group": []}
    with pytest.raises(RewardError, match=r"can't be sent to the process of reward\.fn='lengths:score'"):
        process.ask({"items": [{**item, "record": {"call": lambda: 0}}]})
    assert process.unanswered == []
    assert await told(process.ask({"items": [{**item, "record": {}}]})) == [2]


async def test_a_record_that_can_not_be_read_ends_the_process_of_the_episodes(episodes):
    """The thread that reads the orders ended, and each later episode took as long as rollout.episode_timeout."""
    process = await episodes()
    with pytest.raises(ProcessGone, match="exit code 1"):
        await told(process.ask({"record": Unreadable()}))
