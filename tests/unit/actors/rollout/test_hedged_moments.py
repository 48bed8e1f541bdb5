"""A silent server's request goes to another one too, moment by moment: servers answer when the test says so."""

import asyncio
import contextlib
import json
from types import SimpleNamespace
from unittest import mock

import pytest

from actors.rollout import hedged_requests
from actors.rollout.group_progress import GroupProgress
from actors.rollout.hedged_requests import HedgedRequests
from actors.rollout.stream_pace import StreamPace
from actors.serving.completions import Samples
from actors.serving.sglang_client import RequestFailed, Sampling
from launcher.base.messages import ServerState
from launcher.base.rollouts import Completion
from launcher.config.schema import GenerationConfig, RolloutConfig
from tests.support.machine import scaled
from tests.support.ready_servers import pool_of, ready

SAMPLING = Sampling.from_config(GenerationConfig(max_new_tokens=4))
PROMPT = (1, 2)
HOURS = RolloutConfig(retry_wait_initial=7200.0)
AT_ONCE = RolloutConfig(retry_wait_initial=0.0)


class Asked:
    """One request to a server."""

    def __init__(self, url, stream, inputs):
        self.url, self.stream, self.inputs = url, stream, inputs
        self.answer = asyncio.get_running_loop().create_future()

    def sends(self, token, *, is_last=False):
        meta = {
            "finish_reason": {"type": "stop"} if is_last else None,
            "completion_tokens": 1,
            "weight_version": "0",
            "output_token_logprobs": [[-1.0, token]],
        }
        event = {"index": 0, "output_ids": [token], "meta_info": meta}
        self.stream.feed(f"data: {json.dumps(event)}\n\n".encode())

    def ends(self, kind=""):
        """`kind`: of the failure that it ends with."""
        self.answer.set_result(self.stream.samples(RequestFailed("it is gone", kind=kind) if kind else None))

    @property
    def is_aborted(self):
        return self.answer.cancelled()


class Scene:
    """Two servers. `silent`: those that are, if they are asked anything, and why."""

    def __init__(self, pool, config):
        self.asked, self.told, self.silent, self.pool = [], [], {}, pool
        self.is_seen_once = False
        self.asking = []
        client = SimpleNamespace(generate_samples=self.generate_samples)
        self.requests = HedgedRequests(client, pool, config, lambda *event: self.told.append(event))

    def silent_servers(self, looks, config):
        found = {key: why for key, why in self.silent.items() if key in looks}
        if found and self.is_seen_once:
            self.silent = {}
        return found

    async def generate_samples(self, url, stream, *, inputs, **more):
        self.asked.append(Asked(url, stream, inputs))
        return await self.asked[-1].answer

    def ask(self, *, avoid=""):
        progress = GroupProgress(PROMPT, [SAMPLING], 0)
        self.asking.append(asyncio.create_task(self.requests.ask(progress, prompt="p", weight_version=0, avoid=avoid)))
        return self.asking[-1]

    async def until(self, holds):
        """Fails at once with what a request failed with."""
        while not holds():
            for task in self.asking:
                assert not task.done() or task.result()
            await asyncio.sleep(0.001)

    async def falls_silent(self, number):
        """Until the request is sent to the other one too."""
        before = len(self.asked)
        self.silent = {(f"server-{number}", 0): "nothing is heard"}
        await self.until(lambda: len(self.asked) > before)

    async def may_serve_again(self, number):
        await self.pool.update([ready(f"url-{number}", number)])


@contextlib.asynccontextmanager
async def scene(monkeypatch, config=HOURS):
    pool = await pool_of(["url-0", "url-1"])
    made = Scene(pool, config)
    monkeypatch.setattr(hedged_requests, "TICK_S", 0.001)
    monkeypatch.setattr(hedged_requests, "silent_servers", made.silent_servers)
    async with asyncio.timeout(scaled(2.0)):
        yield made
    await pool.close()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == [], "nothing is left running"


async def some_time():
    """Looks at the servers, each of which could send a request on."""
    for _ in range(20):
        await asyncio.sleep(0.001)


def ended(lost, hedged):
    reason = f"{lost} of {hedged} requests that were sent to another server too were answered there"
    return ("hedge.ended", "server-0", reason)


BEGAN = ("hedge.began", "server-0", "nothing is heard")


async def test_the_other_one_continues_from_the_last_token_and_the_silent_one_is_aborted(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until(lambda: now.asked)
        now.asked[0].sends(7)
        await now.falls_silent(0)
        assert [(one.url, one.inputs) for one in now.asked] == [("url-0", [PROMPT]), ("url-1", [(*PROMPT, 7)])]
        assert [one.state for one in now.pool.servers()] == [ServerState.SUSPECT, ServerState.READY]
        now.asked[1].sends(8, is_last=True)
        await now.until(lambda: now.asked[0].is_aborted)
        now.asked[1].ends()
        answer = await asking
        assert (answer.server.name, answer.hedged, answer.lost) == ("server-1", 1, 1)
        answer.progress.take(answer.samples)
        assert [one.token_ids for one in answer.progress.completions()] == [(7, 8)]
        assert now.told == [BEGAN, ended(1, 1)], "no request is left there"
        again = now.ask()
        await now.until(lambda: len(now.asked) == 3)
        now.asked[2].sends(7, is_last=True)
        now.asked[2].ends()
        assert (await again).hedged == 0


async def test_one_that_is_heard_again_first_answers_itself_and_its_silence_is_over(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until(lambda: now.asked)
        await now.falls_silent(0)
        await some_time()  # at each look it is silent
        now.silent = {}
        now.asked[0].sends(7)
        await now.until(lambda: now.asked[1].is_aborted)
        await now.until(lambda: len(now.told) == 2)
        assert [event[:2] for event in now.told] == [BEGAN[:2], ("hedge.ended", "server-0")], (
            "though it is not answered"
        )
        now.asked[0].sends(8, is_last=True)
        now.asked[0].ends()
        answer = await asking
        assert (answer.server.name, answer.hedged, answer.lost, len(now.asked)) == ("server-0", 1, 0, 2)


@pytest.mark.parametrize("config", [AT_ONCE, HOURS], ids=["at once", "later"])
async def test_where_the_other_one_fails_the_silent_one_is_waited_for(monkeypatch, config):
    """And it is not sent on again before it was found silent anew, and a while later."""
    async with scene(monkeypatch, config) as now:
        now.is_seen_once = config is AT_ONCE
        asking = now.ask()
        await now.until(lambda: now.asked)
        await now.falls_silent(0)
        now.asked[1].ends("refused")
        await some_time()
        assert len(now.asked) == 2
        assert not asking.done()
        now.asked[0].sends(7, is_last=True)
        now.asked[0].ends()
        answer = await asking
        assert (answer.server.name, answer.hedged, answer.lost) == ("server-0", 1, 0)
        if config is HOURS:
            assert now.told == [BEGAN, ended(0, 1)]


@pytest.mark.parametrize("wins_by", ["being heard", "the other one's end"])
async def test_one_that_took_over_and_falls_silent_is_sent_on_at_once(monkeypatch, wins_by):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until(lambda: now.asked)
        await now.falls_silent(0)
        if wins_by == "being heard":
            now.asked[1].sends(7)
            await now.until(lambda: now.asked[0].is_aborted)
        else:
            now.asked[0].ends("reset")
        await now.may_serve_again(0)
        await now.falls_silent(1)
        assert now.asked[2].url == "url-0"
        now.asked[2].sends(8, is_last=True)
        now.asked[2].ends()
        answer = await asking
        assert (answer.server.name, answer.hedged, answer.lost) == ("server-0", 2, 2)


async def test_a_whole_answer_out_of_the_silence_is_taken(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until(lambda: now.asked)
        await now.falls_silent(0)
        made = Completion(token_ids=(7,), logprobs=(-1.0,), weight_version=0, finish_reason="stop")
        now.asked[0].answer.set_result(Samples(completions={0: made}, failure=None))
        answer = await asking
        assert (answer.server.name, answer.lost, answer.samples.failure) == ("server-0", 0, None)
        assert now.asked[1].is_aborted


async def test_where_both_fail_at_once_it_is_the_silent_one_s_failure(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until(lambda: now.asked)
        await now.falls_silent(0)
        now.asked[0].ends("reset")
        now.asked[1].ends("refused")
        answer = await asking
        assert (answer.server.name, answer.lost, answer.samples.failure.kind) == ("server-0", 0, "reset")


async def test_it_is_not_sent_to_the_silent_one_itself_where_the_other_leaves_before_it_is_asked(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until(lambda: now.asked)
        await now.pool.limit(1)  # no room for the same request at another one
        now.silent = {("server-0", 0): "nothing is heard"}
        await now.until(lambda: now.told)
        await now.pool.update([ready("url-1", 1, state=ServerState.STOPPED)])
        await now.may_serve_again(0)
        await now.pool.limit(9)
        await some_time()
        assert len(now.asked) == 1
        now.asked[0].sends(7, is_last=True)
        now.asked[0].ends()
        answer = await asking
        assert (answer.server.name, answer.hedged, answer.lost) == ("server-0", 1, 0)


async def test_the_pace_of_servers_is_told_of_each_request_and_of_all_that_is_heard(monkeypatch):
    async with scene(monkeypatch) as now:
        pace = now.requests._pace = mock.Mock(wraps=StreamPace())
        asking = now.ask()
        await now.until(lambda: now.asked)
        now.asked[0].sends(7)
        await some_time()
        now.asked[0].sends(8, is_last=True)
        now.asked[0].ends()
        await asking
        told = [call[0] for call in pace.method_calls if call[0] != "looks"]
        assert told[:2] == ["tick", "begins"], "of now, not of the last request's time"
        assert [name for name in told if name != "tick"] == ["begins", "heard", "heard", "ends"]
        assert told.count("tick") > 1, "time goes by"


async def test_a_defect_of_the_watch_fails_the_next_request(monkeypatch):
    """Without it no silence would be noticed."""
    async with scene(monkeypatch) as now:
        monkeypatch.setattr(hedged_requests, "silent_servers", lambda looks, config: 1 / 0)
        first = now.ask()
        await now.until(lambda: now.requests._watching is not None and now.requests._watching.done())
        with pytest.raises(ZeroDivisionError):
            await now.ask()
        now.asked[0].sends(7, is_last=True)
        now.asked[0].ends()
        assert (await first).samples.failure is None


async def test_one_that_was_heard_again_and_falls_silent_once_more_is_sent_on_at_once(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until(lambda: now.asked)
        await now.falls_silent(0)
        now.silent = {}
        now.asked[0].sends(7)
        await now.until(lambda: now.asked[1].is_aborted)
        await now.falls_silent(0)
        assert [(one.url, one.inputs) for one in now.asked[1:]] == [("url-1", [PROMPT]), ("url-1", [(*PROMPT, 7)])]
        now.asked[2].sends(8, is_last=True)
        now.asked[2].ends()
        assert (await asking).hedged == 2


async def test_the_only_server_is_asked_also_where_it_is_to_be_avoided_and_is_not_suspected(monkeypatch):
    async with scene(monkeypatch) as now:
        await now.pool.update([ready("url-1", 1, state=ServerState.STOPPED)])
        asking = now.ask(avoid="server-0")
        await now.until(lambda: now.asked)
        now.silent = {("server-0", 0): "nothing is heard"}
        await some_time()
        assert (len(now.asked), now.told) == (1, [])
        assert now.pool.servers()[0].state is ServerState.READY
        now.asked[0].sends(7, is_last=True)
        now.asked[0].ends()
        assert (await asking).samples.failure is None


async def test_a_stop_aborts_what_is_asked_and_a_defect_is_raised(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until(lambda: now.asked)
        await now.falls_silent(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert [one.is_aborted for one in now.asked] == [True, True]
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until(lambda: now.asked)
        await now.falls_silent(0)
        now.asked[1].answer.set_exception(KeyError("a defect"))
        with pytest.raises(KeyError, match="a defect"):
            await asking
