"""A trainer that waits for a server without a limit stands at once when it is told to."""

import dataclasses
import threading
import types
from concurrent import futures
from functools import partial

import pytest

from actors.data.prompt_queue import PromptQueue
from actors.processes.loop_thread import LoopThread
from actors.rollout.rollout_engine import LiveRollouts, RolloutEngine, Stopped
from actors.rollout.server_pool import ServerPool
from actors.serving.sglang_client import SGLangClient
from launcher.base.rollouts import Completion, Rollout, RolloutBatch, RolloutGroup
from launcher.config.schema import DatasetConfig, RunConfig
from tests.support.machine import scaled
from tests.support.replay import prompts

deadline_s = partial(scaled, 60)


ANSWER = Completion(token_ids=(7,), logprobs=(-1.0,), weight_version=7, finish_reason="stop")


async def nobody(url):
    return None


@pytest.fixture
def held():
    """Rollouts from a pool that no server ever joins; `waits` is set when a request asks for one."""
    thread, waits = LoopThread("rollouts"), threading.Event()

    class Pool(ServerPool):
        async def _wait_for_server(self, *request):
            waits.set()
            return await super()._wait_for_server(*request)

    async def make():
        client, pool = SGLangClient(), Pool(nobody)
        config = RunConfig(experiment_name="held", train_dataset=DatasetConfig(path="none"))
        engine = RolloutEngine(client=client, pool=pool, scorer=None, config=config.rollout, decode=lambda ids: [])
        items = prompts(4)
        return client, pool, LiveRollouts(thread, engine, config=config, prompts=items, held_out=items)

    client, pool, rollouts = thread.call(make())
    yield rollouts, waits
    thread.call(pool.close())
    thread.call(client.close())
    thread.close()


@pytest.mark.parametrize("what", ["collect", "evaluate"])
def test_a_stop_ends_the_wait_for_a_server_that_never_comes(held, what):
    rollouts, waits = held
    queue, ended = PromptQueue([*prompts(4)], seed=1, shuffle=False), []

    def wait():
        try:
            if what == "collect":
                rollouts.collect(queue, want=2, weight_version=0)
            else:
                rollouts.evaluate(0)
        except Stopped as stopped:
            ended.append(stopped)

    trainer = threading.Thread(target=wait, daemon=True)
    trainer.start()
    assert waits.wait(deadline_s())
    assert trainer.is_alive(), "it waits"
    rollouts.stop()
    trainer.join(deadline_s())
    assert not trainer.is_alive()
    assert len(ended) == 1
    queue.load_state_dict(queue.state_dict())  # as the loop does when it goes on
    assert queue.waiting == 4, "no prompt was lost"


def group_of(prompt, *rewards):
    rollouts = tuple(Rollout(completion=ANSWER, text="", reward=reward) for reward in rewards)
    return RolloutGroup(prompt=prompt, rollouts=rollouts)


class Judge:
    """An engine whose reward function has no answer to the greedy completion of one prompt. `asked`: what for."""

    def __init__(self):
        self.asked = []

    async def collect_batch(self, queue, items, *, want, n_samples, sampling, weight_version, **more):
        self.asked.append((queue.take_prompts(want), n_samples, weight_version, more))
        answered = [one for one in items.values() if sampling.temperature or one.id != "p001"]
        groups = [group_of(one, *[1.0] * n_samples, None) for one in answered]
        return RolloutBatch(groups=tuple(groups), failed=3, retried=0, generated_tokens=1, seconds=1.0)


@pytest.mark.parametrize(("in_flight", "at_once"), [((6, 4), (4, 24)), ((1, 1), (1, 1))])
def test_an_evaluation_says_how_many_prompts_are_missing_in_its_means(in_flight, at_once):
    thread, judge = LoopThread("rollouts"), Judge()
    config = RunConfig(experiment_name="held", train_dataset=DatasetConfig(path="none"))
    config.rollout.max_concurrent_rollouts, config.gconfig.n_samples = in_flight
    config.evaluator.n_samples = 5
    items = prompts(4)
    items["p001"] = dataclasses.replace(items["p001"], dataset="hard")
    report = LiveRollouts(thread, judge, config=config, prompts=items, held_out=items).evaluate(7)
    thread.close()
    assert (report.policy_version, report.prompts, report.unscored) == (7, 4, 1)
    assert (report.sampled, report.greedy, dict(report.by_dataset)) == (1.0, 1.0, {})
    wanted = [{"concurrent_prompts": number, "may_leave_out": True} for number in at_once]
    assert judge.asked == [([*items], 5, 7, wanted[0]), ([*items], 1, 7, wanted[1])]


class Streams:
    """An engine whose streams are of the test's own; each is `made` once, and may be `closed`."""

    def __init__(self):
        self.made = []
        self.closed = []

    def stream(self, queue, items, **more):
        self.made.append(queue)
        return types.SimpleNamespace(queue=queue, next_batch=self._next, close=partial(self._close, queue))

    async def _next(self, want, *, version):
        return want, version

    async def _close(self, queue):
        self.closed.append(queue)


def test_a_queue_has_one_stream_until_it_is_dropped_and_nothing_is_collected_between_a_stop_and_its_end():
    thread, engine = LoopThread("rollouts"), Streams()
    config = RunConfig(experiment_name="held", train_dataset=DatasetConfig(path="none"))
    rollouts = LiveRollouts(thread, engine, config=config, prompts=prompts(4), held_out={})
    assert rollouts.evaluate(0) is None, "there is nothing to evaluate"
    rollouts.abandon()
    rollouts.stop()
    rollouts.allow()
    assert engine.made == engine.closed == []
    first, other = (PromptQueue([*prompts(4)], seed=1, shuffle=False) for _ in range(2))
    assert [rollouts.collect(first, want=2, weight_version=version) for version in (3, 4)] == [(2, 3), (2, 4)]
    assert rollouts.collect_apart(other, want=1, weight_version=5) == (1, 5)
    assert engine.made == [first, other]
    rollouts.abandon()
    assert engine.closed == [first]
    rollouts.stop()
    with pytest.raises(Stopped):
        rollouts.collect(first, want=2, weight_version=5)
    rollouts.allow()
    assert rollouts.collect(other, want=2, weight_version=5) == (2, 5)
    thread.close()
    assert engine.made == [first, other, other]
    assert engine.closed == [first, first]


def test_a_stop_just_as_the_wait_begins_ends_it_too(held, monkeypatch):
    """Seen in CI: what was made was dropped before its wait was known, and the wait met tasks it had not known."""
    rollouts, waits = held
    submit, stops = rollouts._thread.submit, []

    def begun_before_it_is_known(work):
        monkeypatch.undo()
        begun = submit(work)
        assert waits.wait(deadline_s())
        stops.append(threading.Thread(target=rollouts.stop))
        stops[0].start()
        futures.wait([begun], timeout=0.5)
        return begun

    monkeypatch.setattr(rollouts._thread, "submit", begun_before_it_is_known)
    with pytest.raises(Stopped):
        rollouts.collect(PromptQueue([*prompts(4)], seed=1, shuffle=False), want=2, weight_version=0)
    stops[0].join(deadline_s())
    assert not stops[0].is_alive()
