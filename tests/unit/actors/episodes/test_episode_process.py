"""A process of the episodes: what is sent to it while it ends, reads nothing, or its episode is cancelled."""

import asyncio
import signal
import threading
from types import SimpleNamespace

import pytest

from actors.episodes.episode_process import EpisodeProcess
from actors.reward.reward_process import ProcessGone
from tests.support.machine import all_turns
from tests.support.worlds.episodes import config_of

pytestmark = pytest.mark.timeout(300)


async def test_an_episode_that_waits_to_be_sent_while_its_process_is_buried_is_told_that_it_is_gone():
    process = EpisodeProcess(config_of("two_turns"))
    await process.ready()
    await process._sending.acquire()
    playing = asyncio.create_task(process.play({"prompt_id": "p0"}))
    burial = asyncio.create_task(process.close())
    while not process.is_gone:
        await asyncio.sleep(0.01)
    process._sending.release()
    with pytest.raises(ProcessGone):
        await playing
    await burial


async def test_a_process_that_reads_nothing_is_ended_and_so_is_the_episode_told(monkeypatch):
    process = EpisodeProcess(config_of("two_turns"))
    await process.ready()
    monkeypatch.setattr("actors.episodes.episode_process.SEND_S", 0.1)
    process._process._process.send_signal(signal.SIGSTOP)
    with pytest.raises(ProcessGone, match=r"it read nothing for 0\.1 s"):
        await process.play({"record": "x" * 2**22})
    await process.close()
    assert process.is_gone


async def test_a_process_that_takes_no_message_is_gone_before_its_reader_has_noticed(monkeypatch):
    process = EpisodeProcess(config_of("two_turns"))
    await process.ready()
    loop = asyncio.get_running_loop()
    late = SimpleNamespace(create_future=loop.create_future, call_soon_threadsafe=lambda *_: None)
    monkeypatch.setattr(process, "_loop", late)
    process._process.kill()
    await asyncio.to_thread(process._process._process.wait)
    with pytest.raises(ProcessGone, match="killed by SIGKILL"):
        await process.play({"record": "r"})
    assert process.is_gone
    await process.close()


async def test_a_message_is_sent_whole_however_often_its_episode_is_cancelled(monkeypatch):
    process, release, sent = EpisodeProcess(config_of("two_turns")), threading.Event(), []
    await process.ready()

    def send(message, deadline):
        sent.append(message.get("prompt_id", "cancel"))
        release.wait(30)
        sent.append("whole")

    monkeypatch.setattr(process._process, "send", send)
    playing = asyncio.create_task(process.play({"prompt_id": "p0"}))
    while not sent:
        await asyncio.sleep(0.01)
    for _ in range(3):
        playing.cancel()
        await all_turns()
    assert not playing.done()
    assert process._sending.locked()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await process.close()
    assert sent[:2] == ["p0", "whole"]
