"""Two real SGLang servers on the CPU, the scheduler of one stopped in mid-generation: for good, and for a moment."""

import asyncio
import contextlib
import dataclasses
import os
import signal

import pytest

from actors.processes.process_tree import descendants, name
from actors.rollout.request_loop import KNOWN_AT
from actors.rollout.rollout_engine import RolloutEngine
from actors.rollout.server_pool import ServerPool
from actors.serving.server_watch import ServerWatch
from actors.serving.sglang_client import RequestFailed, SGLangClient
from launcher.base.messages import Cause, Health, ServerState
from launcher.base.rollouts import Prompt
from launcher.config.schema import RolloutConfig
from launcher.config.supervision import HealthConfig
from launcher.run_files.run_keys import ServerKeys
from tests.support.real_server import Serving, deadline_s, endless
from tests.support.worlds.rollout import EveryoneIsRight, queue_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

GREEDY = dataclasses.replace(endless(), temperature=0.0)
PROMPTS, TOKENS = 12, 600  # long enough to be met in their midst by a process that waits for a CPU
CONFIG = RolloutConfig(hedge_after_s=0.3, stream_interval=8)


@pytest.fixture(scope="module")
def servings(tmp_path_factory):
    both = []
    try:
        for _ in range(2):
            both.append(Serving(tmp_path_factory.mktemp("serving")))
            both[-1].start()
        yield both
    finally:
        for serving in both:
            serving.run(lambda _, serving=serving: serving.server.close())
            serving.loop.close()


class Both:
    """Rollouts from both servers, and a watch on the first."""

    def __init__(self, servings, stack, settings):
        self.servings = servings
        self._stack = stack
        self._settings = settings
        self.told = []
        self.verdicts = []
        head = servings[0].server.info().pid
        self.scheduler = next(p.pid for p in descendants(head) if name(p).startswith("sglang::sched"))

    async def begin(self):
        clients = [
            await self._stack.enter_async_context(SGLangClient(ServerKeys.read_file(serving.keys)))
            for serving in self.servings
        ]
        by_url = {serving.url: client for serving, client in zip(self.servings, clients, strict=True)}

        class EachWithItsKeys:
            """Two servers of a run share their keys; these two have their own."""

            def generate_samples(self, url, *args, **more):
                return by_url[url].generate_samples(url, *args, **more)

        async def probe(url):
            with contextlib.suppress(RequestFailed):
                one = dataclasses.replace(GREEDY, max_new_tokens=1, min_new_tokens=1)
                return (
                    await by_url[url].generate(url, token_ids=(5,), sampling=one, timeout_s=deadline_s())
                ).weight_version

        self.pool = ServerPool(probe)
        self.infos = [
            dataclasses.replace(serving.server.info(), name=f"server-{i}", index=i)
            for i, serving in enumerate(self.servings)
        ]
        await self.pool.update(self.infos)
        self.engine = RolloutEngine(
            client=EachWithItsKeys(),
            pool=self.pool,
            scorer=EveryoneIsRight(),
            config=CONFIG,
            decode=lambda ids: [str(i) for i in ids],
            told=lambda *event: self.told.append(event),
        )
        self.watch = ServerWatch(
            self.infos[0], self._settings, clients[0], changed=lambda: self.verdicts.append(self.watch.verdict())
        )
        watching = asyncio.create_task(self.watch.run())
        self._stack.push_async_callback(self._end, watching)

    async def _end(self, watching):
        os.kill(self.scheduler, signal.SIGCONT)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await self.pool.close()

    async def collect(self, count, tokens):
        start = self.servings[0].prompt
        items = {f"p{n}": Prompt(id=f"p{n}", token_ids=(*start, 20 + n), record={}) for n in range(count)}
        sampling = dataclasses.replace(GREEDY, max_new_tokens=tokens, min_new_tokens=tokens)
        wanted = {"want": count, "n_samples": 2, "sampling": sampling, "concurrent_prompts": 4}
        return await self.engine.collect_batch(
            queue_of(items), items, weight_version=self.servings[0].version, **wanted
        )

    async def until(self, holds):
        while not holds():
            await asyncio.sleep(0.01)

    async def warm_up(self):
        """Until it is known how long a request usually waits for tokens of each server."""
        while not self.is_known():
            await self.collect(12, tokens=40)

    def is_known(self):
        paces = self.engine._loop._pace._servers
        return len(paces) == 2 and all(len(server.longest_s) >= KNOWN_AT for server in paces.values())

    def has_moved_on(self):
        """Whether all has left the first server but what was moved to it and never heard of there, since the other was
        silent too for a moment, as it may be on a busy machine. That waits for the server's restart."""
        live = self.engine._loop._live
        return all(turn.request.is_unheard for turn in live if turn.server.name == "server-0")

    async def stop_in_the_midst(self, running):
        """Its scheduler, while it answers a request of which some tokens have arrived, and the others never will."""
        live = self.engine._loop._live

        def begun():
            return any(one.first_s is not None for turn, one in live.items() if turn.server.name == "server-0")

        while True:
            await self.until(lambda: begun() or running.done())
            assert not running.done(), "no request of it was met in its midst"
            os.kill(self.scheduler, signal.SIGSTOP)
            before = len(self.told)
            # Until it is silent: what was on its way has arrived by then, and the rest is moved.
            await self.until(lambda before=before: len(self.told) > before or not begun())
            if len(self.told) > before:
                return
            os.kill(self.scheduler, signal.SIGCONT)


def with_both(servings, work, settings=None):
    """No verdict on a server comes in between, unless `settings` say otherwise."""
    long = deadline_s()
    patient = HealthConfig(stopped_s=long, silence_s=long, silence_max_s=long, proof_s=long)

    async def inside():
        async with asyncio.timeout(deadline_s()), contextlib.AsyncExitStack() as stack:
            both = Both(servings, stack, settings or patient)
            await both.begin()
            await both.warm_up()
            return await work(both)

    return asyncio.run(inside())


def tokens_of(batch):
    return {group.prompt.id: [r.completion.token_ids for r in group.rollouts] for group in batch.groups}


@pytest.fixture(scope="module")
def unbroken(servings):
    async def work(both):
        return await both.collect(PROMPTS, tokens=TOKENS)

    return tokens_of(with_both(servings, work))


def assert_each_once(batch, unbroken):
    assert tokens_of(batch) == unbroken
    assert len(batch.prompt_ids) == len(set(batch.prompt_ids)) == PROMPTS
    assert batch.generated_tokens == PROMPTS * 2 * TOKENS
    assert (batch.failed, batch.retried) == (0, 0)


def test_a_stop_of_a_moment_condemns_nobody_and_no_token_is_there_twice(servings, unbroken):
    async def work(both):
        running = asyncio.create_task(both.collect(PROMPTS, tokens=TOKENS))
        await both.stop_in_the_midst(running)
        await both.until(lambda: both.told or both.watch._evidence.stopped_s > 0)
        os.kill(both.scheduler, signal.SIGCONT)
        batch = await running
        await both.until(lambda: both.pool.servers()[0].state is ServerState.READY)
        return batch, both.verdicts

    batch, verdicts = with_both(servings, work)
    assert_each_once(batch, unbroken)
    assert {verdict.health for verdict in verdicts} <= {Health.HEALTHY, Health.UNKNOWN}


def test_a_stop_for_good_is_condemned_and_the_answers_come_from_the_other_as_they_would_have(servings, unbroken):
    async def work(both):
        running = asyncio.create_task(both.collect(PROMPTS, tokens=TOKENS))
        await both.stop_in_the_midst(running)
        await both.until(lambda: running.done() or both.has_moved_on())
        await both.until(lambda: both.watch.verdict().health is Health.DEAD)
        verdict, state = both.watch.verdict(), both.pool.servers()[0].state
        os.kill(both.scheduler, signal.SIGCONT)  # as nobody restarts it here
        batch = await running
        await both.until(lambda: both.pool.servers()[0].state is ServerState.READY)
        return batch, verdict, state, both.told

    batch, verdict, state, told = with_both(servings, work, HealthConfig())
    assert_each_once(batch, unbroken)
    assert batch.hedged >= 1
    urls = [serving.url for serving in servings]
    assert " ".join(urls) in {r.completion.server for r in batch.rollouts}, "begun by one, continued by the other"
    assert batch.kept_tokens > 0
    assert state is ServerState.SUSPECT
    assert (verdict.cause, verdict.reason.partition(" for ")[0]) == (Cause.SERVER_HANG, "scheduler stopped")
    assert ("hedge.began", "server-0") in {event[:2] for event in told}
