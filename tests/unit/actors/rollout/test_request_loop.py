"""A request moves from one server to the next, moment by moment: servers answer when the test says so."""

import asyncio
import contextlib
import json
from types import SimpleNamespace
from unittest import mock

import pytest
from stamina.instrumentation import set_on_retry_hooks

from actors.rollout import request_loop, server_pool
from actors.rollout.request_loop import GroupProgress, GroupRequest, RequestLoop, StreamPace, request_attempts
from actors.serving.sglang_client import RequestFailed, Sampling
from launcher.base.messages import ServerState
from launcher.config.schema import GenerationConfig, RolloutConfig
from tests.support.machine import scaled
from tests.support.ready_servers import pool_of, ready

SAMPLING = Sampling.from_config(GenerationConfig(max_new_tokens=4))
PROMPT = (1, 2)
CONFIG = RolloutConfig()
QUICK = RolloutConfig(request_retries=3, retry_wait_initial=0.001, retry_wait_max=0.01)


class Sent:
    """What one server was asked."""

    def __init__(self, url, stream, inputs):
        self.url = url
        self.stream = stream
        self.inputs = inputs
        self.answer = asyncio.get_running_loop().create_future()

    def sends(self, token, *, is_last=False, index=0):
        meta = {
            "finish_reason": {"type": "stop"} if is_last else None,
            "completion_tokens": 1,
            "weight_version": "0",
            "output_token_logprobs": [[-1.0, token]],
        }
        event = {"index": index, "output_ids": [token], "meta_info": meta}
        self.stream.feed(f"data: {json.dumps(event)}\n\n".encode())

    def ends(self, kind=""):
        """`kind`: of the failure that it ends with."""
        self.answer.set_result(self.stream.samples(RequestFailed("it is gone", kind=kind) if kind else None))

    def answers(self, token):
        self.sends(token, is_last=True)
        self.ends()

    @property
    def is_aborted(self):
        return self.answer.cancelled()


class Scene:
    """Two servers. `silent`: those that are, if they are asked anything, and why."""

    def __init__(self, pool):
        self.sent = []
        self.told = []
        self.silent = {}
        self.pool = pool
        self.asking = []
        self.loop = RequestLoop(pool, CONFIG, lambda *event: self.told.append(event))

    def silent_servers(self, looks, config):
        return {key: why for key, why in self.silent.items() if key in looks}

    async def generate_samples(self, url, stream, *, inputs, **more):
        self.sent.append(Sent(url, stream, inputs))
        return await self.sent[-1].answer

    def ask(self, *, avoid="", samples=1):
        progress = GroupProgress(PROMPT, [SAMPLING] * samples, 0)
        self.request = GroupRequest("p", progress, SimpleNamespace(generate_samples=self.generate_samples), CONFIG)
        self.request.avoid = avoid
        self.asking.append(asyncio.create_task(self.loop.ask(self.request, 0)))
        return self.asking[-1]

    def tokens(self):
        return [one.token_ids for one in self.request.progress.completions()]

    async def until(self, holds):
        """Fails at once with what a request failed with."""
        while not holds():
            for task in self.asking:
                if task.done():
                    task.result()
            await asyncio.sleep(0.001)

    async def until_sent(self, count):
        await self.until(lambda: len(self.sent) == count)

    async def falls_silent(self, number):
        """Until its request was sent to another one."""
        before = len(self.sent)
        self.silent = {(f"server-{number}", 0): "nothing is heard"}
        await self.until(lambda: len(self.sent) > before)

    async def may_serve_again(self, number):
        await self.pool.update([ready(f"url-{number}", number)])


@contextlib.asynccontextmanager
async def scene(monkeypatch):
    pool = await pool_of(["url-0", "url-1"])
    made = Scene(pool)
    monkeypatch.setattr(request_loop, "TICK_S", 0.001)
    monkeypatch.setattr(request_loop, "silent_servers", made.silent_servers)
    async with asyncio.timeout(scaled(2.0)):
        yield made
    await pool.close()
    assert pool.turns == set()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == [], "nothing is left running"


async def some_looks():
    """At the servers, each of which could move a request on."""
    for _ in range(20):
        await asyncio.sleep(0.001)


BEGAN = ("hedge.began", "server-0", "nothing is heard")


async def test_another_one_continues_from_the_last_token_and_the_silent_one_is_aborted_before(monkeypatch):
    """The loser is aborted, and none of its tokens is taken."""
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until_sent(1)
        now.sent[0].sends(7)
        await now.falls_silent(0)
        assert [(one.url, one.inputs) for one in now.sent] == [("url-0", [PROMPT]), ("url-1", [(*PROMPT, 7)])]
        assert now.sent[0].is_aborted
        assert now.request.avoid == "server-0", "if it may serve again before"
        assert [one.state for one in now.pool.servers()] == [ServerState.SUSPECT, ServerState.READY]
        now.sent[0].sends(9)
        now.sent[1].answers(8)
        await asking
        assert (now.tokens(), now.request.silences, now.told) == ([(7, 8)], 1, [BEGAN])
        again = now.ask()
        await now.until_sent(3)
        now.sent[2].answers(7)
        await again
        assert (now.sent[2].url, now.request.silences) == ("url-1", 0)


async def test_what_was_whole_when_its_server_fell_silent_is_not_asked_again(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask(samples=2)
        await now.until_sent(1)
        now.sent[0].sends(7, is_last=True)
        now.sent[0].sends(5, index=1)
        await now.falls_silent(0)
        assert now.sent[1].inputs == [(*PROMPT, 5)]
        now.sent[1].answers(6)
        await asking
        assert now.tokens() == [(7,), (5, 6)]


async def test_all_that_was_asked_may_be_there_when_its_server_falls_silent(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until_sent(1)
        now.sent[0].sends(7, is_last=True)
        now.silent = {("server-0", 0): "nothing is heard"}
        await asking
        assert (now.tokens(), len(now.sent)) == ([(7,)], 1)


async def test_two_silent_servers_do_not_hand_a_request_to_each_other(monkeypatch):
    """Each would begin anew, and neither ever come to a token."""
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until_sent(1)
        await now.falls_silent(0)
        await now.may_serve_again(0)
        now.silent = {("server-1", 0): "nothing is heard"}
        await some_looks()
        assert len(now.sent) == 2, "it stays until it has been heard"
        now.sent[1].sends(7)
        await now.until_sent(3)
        assert (now.sent[2].url, now.sent[2].inputs) == ("url-0", [(*PROMPT, 7)])
        now.sent[2].answers(8)
        await asking
        assert (now.tokens(), now.request.silences) == ([(7, 8)], 2)


async def test_a_failure_of_the_other_one_is_a_failure_and_what_is_asked_again_may_move_again(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until_sent(1)
        await now.falls_silent(0)
        now.silent = {}
        now.sent[1].ends("reset")
        with pytest.raises(RequestFailed, match="it is gone"):
            await asking
        assert [one.state for one in now.pool.servers()] == [ServerState.SUSPECT, ServerState.SUSPECT]
        now.asking = [asyncio.create_task(now.loop.ask(now.request, 0))]
        await now.may_serve_again(0)
        await now.until_sent(3)
        await now.may_serve_again(1)
        await now.falls_silent(0)
        assert now.sent[3].url == "url-1"
        now.sent[3].answers(7)
        await now.asking[0]
        assert now.tokens() == [(7,)]


@pytest.mark.parametrize("kind", ["reset", "nonfinite"])
async def test_what_a_request_saw_of_a_server_that_was_replaced_meanwhile_is_no_word_on_the_next(monkeypatch, kind):
    """The successor lost its traffic for what its predecessor had done."""
    async with scene(monkeypatch) as now:
        asking = now.ask(avoid="server-1")
        await now.until_sent(1)
        now.sent[0].sends(7)
        await now.pool.update([ready("url-0", 0, generation=1)])
        now.sent[0].ends(kind)
        with pytest.raises(RequestFailed, match="it is gone"):
            await asking
        assert [one.state for one in now.pool.servers()] == [ServerState.READY, ServerState.READY]


async def test_a_silence_is_told_of_once_and_again_when_it_was_over(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = [now.ask(avoid="server-1"), now.ask(avoid="server-1")]
        await now.until_sent(2)
        now.silent = {("server-0", 0): "nothing is heard"}
        await now.until_sent(4)
        assert now.told == [BEGAN]
        await some_looks()
        assert len(now.sent) == 4
        now.sent[2].answers(7)
        now.sent[3].answers(7)
        await asyncio.gather(*asking)
        await now.may_serve_again(0)
        asking = now.ask(avoid="server-1")
        await now.until_sent(6)
        assert now.told == [BEGAN, BEGAN]
        now.sent[5].answers(7)
        await asking


@pytest.mark.parametrize("how", ["leaves", "loads", "has ended"])
async def test_one_whose_server_goes_moves_too_and_not_for_a_silence(monkeypatch, how):
    monkeypatch.setattr(server_pool, "LET_GO_S", 0.01)
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until_sent(1)
        now.sent[0].sends(7)
        match how:
            case "leaves":
                assert await now.pool.drain("server-0", within_s=0) == 1
            case "loads":
                await now.pool.mark_stale(("server-0", 0), "loading")
                assert await now.pool.clear("server-0", within_s=0) == 1
            case _:
                await now.pool.update([ready("url-0", 0, state=ServerState.DEAD)])
        await now.until_sent(2)
        assert now.sent[0].is_aborted
        assert (now.sent[1].url, now.sent[1].inputs) == ("url-1", [(*PROMPT, 7)])
        now.sent[1].answers(8)
        await asking
        assert (now.tokens(), now.request.silences, now.told) == ([(7, 8)], 0, [])


async def test_a_pause_holds_what_comes_and_what_was_moved_until_it_is_over(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until_sent(1)
        now.sent[0].sends(7)
        now.pool.pause()
        assert await now.pool.clear("", within_s=0) == 1
        await some_looks()
        await now.pool.until_served(0)
        assert (len(now.sent), now.sent[0].is_aborted, now.pool.in_flight()["server-0"]) == (1, True, 0)
        await now.pool.resume()
        await now.until_sent(2)
        now.sent[1].answers(8)
        await asking
        assert now.tokens() == [(7, 8)]


async def test_the_pace_of_servers_is_told_of_each_request_and_of_all_that_is_heard(monkeypatch):
    async with scene(monkeypatch) as now:
        pace = now.loop._pace = mock.Mock(wraps=StreamPace())
        asking = now.ask()
        await now.until_sent(1)
        now.sent[0].sends(7)
        await some_looks()
        now.sent[0].answers(8)
        await asking
        told = [call[0] for call in pace.method_calls if call[0] != "looks"]
        assert told[:2] == ["tick", "begins"], "of now, not of the last request's time"
        assert [name for name in told if name != "tick"] == ["begins", "heard", "heard", "ends"]
        assert told.count("tick") > 1, "time goes by"


async def test_a_defect_of_the_watch_fails_the_next_request(monkeypatch):
    """Without it no silence would be noticed."""
    async with scene(monkeypatch) as now:
        monkeypatch.setattr(request_loop, "silent_servers", lambda looks, config: 1 / 0)
        first = now.ask()
        await now.until(lambda: now.loop._watching is not None and now.loop._watching.done())
        with pytest.raises(ZeroDivisionError):
            await now.ask()
        now.sent[0].answers(7)
        await first


async def test_what_another_server_is_asked_stays_there(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = [now.ask(avoid="server-1"), now.ask(avoid="server-0")]
        await now.until_sent(2)
        await now.falls_silent(0)
        await some_looks()
        assert [(one.url, one.is_aborted) for one in now.sent] == [("url-0", True), ("url-1", False), ("url-1", False)]
        now.sent[1].answers(7)
        now.sent[2].answers(7)
        await asyncio.gather(*asking)


async def test_one_that_another_server_would_begin_anew_stays_with_its_silent_one(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        now.request.continues = False
        await now.until_sent(1)
        other = now.ask(avoid="server-1")
        await now.until_sent(2)
        now.silent = {("server-0", 0): "nothing is heard"}
        await now.until_sent(3)
        await some_looks()
        assert ([one.is_aborted for one in now.sent], now.told) == ([False, True, False], [BEGAN])
        now.silent = {}
        await some_looks()
        await now.may_serve_again(0)
        again = now.ask(avoid="server-1")
        await now.until_sent(4)
        now.silent = {("server-0", 0): "nothing is heard"}
        await now.until_sent(5)
        assert (now.told, now.sent[0].is_aborted) == ([BEGAN, BEGAN], False)
        for number in (0, 2, 4):
            now.sent[number].answers(7)
        await asyncio.gather(other, again)
        await asking


async def test_the_only_server_keeps_its_requests_and_is_not_suspected(monkeypatch):
    """Also where it is the one to be avoided."""
    async with scene(monkeypatch) as now:
        await now.pool.update([ready("url-1", 1, state=ServerState.STOPPED)])
        asking = now.ask(avoid="server-0")
        await now.until_sent(1)
        now.silent = {("server-0", 0): "nothing is heard"}
        await some_looks()
        assert (len(now.sent), now.told) == (1, [])
        assert now.pool.servers()[0].state is ServerState.READY
        await now.pool.update([ready("url-2", 2)])
        await now.until_sent(2)
        assert now.sent[1].url == "url-2", "now there is another"
        now.sent[1].answers(7)
        await asking


async def test_a_stop_aborts_what_is_asked_and_a_defect_is_raised(monkeypatch):
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until_sent(1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert now.sent[0].is_aborted
    async with scene(monkeypatch) as now:
        asking = now.ask()
        await now.until_sent(1)
        now.sent[0].answer.set_exception(KeyError("a defect"))
        with pytest.raises(KeyError, match="a defect"):
            await asking


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (RequestFailed("it is gone", kind="reset"), 4),
        (RequestFailed("too long a prompt", kind="http_4xx", retryable=False), 1),
        (ValueError("of the launcher's own"), 1),
    ],
)
async def test_which_failures_are_tried_again(error, times):
    tried = 0
    with pytest.raises(type(error)) as raised:
        async for attempt in request_attempts(QUICK):
            with attempt:
                tried += 1
                raise error
    assert (tried, raised.value) == (times, error)


@pytest.mark.parametrize(
    ("kinds", "waits"),
    [
        (["reset", "reset", "refused"], [False, True, True]),
        (["http_5xx", "truncated", "timeout"], [True, False, True]),
        (["malformed", "http_5xx", "timeout"], [True, True, True]),
    ],
)
async def test_the_first_connection_that_breaks_is_not_waited_after(kinds, waits):
    """Another server could continue at once, and stood idle for 0.2 to 0.4 s. All may be gone: then time is what the
    next ones need."""
    waited, left = [], list(kinds)
    set_on_retry_hooks([lambda details: waited.append(details.wait_for > 0)])
    try:
        async for attempt in request_attempts(QUICK):
            with attempt:
                if left:
                    raise RequestFailed("it is gone", kind=left.pop(0))
    finally:
        set_on_retry_hooks(None)
    assert waited == waits


async def test_an_attempt_that_succeeds_is_the_last():
    tried = 0
    async for attempt in request_attempts(QUICK):
        with attempt:
            tried += 1
            if tried < 3:
                raise RequestFailed("it is gone", kind="reset")
    assert tried == 3
