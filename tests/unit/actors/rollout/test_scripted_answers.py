"""How a prompt's group is made of what servers answer, where the test says each answer: what is asked again and of
whom, what is counted, and what is told to the pool."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from actors.data.prompt_queue import PromptQueue
from actors.episodes.episode import EpisodeFailed
from actors.reward.reward_pool import Score
from actors.rollout.rollout_engine import RolloutEngine
from actors.serving.completions import Samples
from actors.serving.sglang_client import RequestFailed, Sampling
from launcher.base.errors import RewardError, RolloutError
from launcher.base.messages import ServerState
from launcher.base.rollouts import Completion, Rollout
from launcher.config.schema import GenerationConfig, RolloutConfig
from tests.support.ready_servers import pool_of
from tests.support.replay import prompts

SAMPLING = Sampling.from_config(GenerationConfig(max_new_tokens=4))
QUICK = RolloutConfig(request_retries=3, prompt_attempts=2, retry_wait_initial=0.0, retry_wait_max=0.0)
SILENT = Score(value=None, error="no answer", is_unanswered=True)
BROKEN = Score(value=None, error="it raised")
SILENCE = "a silence moves it"


def made(*tokens, version=0, finish_reason="stop"):
    return Completion(
        token_ids=tokens, logprobs=(-1.0,) * len(tokens), weight_version=version, finish_reason=finish_reason
    )


def whole(*tokens, version=0):
    return Samples(completions={i: made(one, version=version) for i, one in enumerate(tokens)}, failure=None)


def failed(kind, *, completions=(), begun=(), retryable=True):
    """Of `completions` and `begun` the places in the request, each with one token."""
    return Samples(
        completions={place: made(7) for place in completions},
        begun={place: made(6, finish_reason="") for place in begun},
        failure=RequestFailed(f"it was {kind}", kind=kind, retryable=retryable),
    )


class Scene:
    """Two servers at version 0; `answers`: of which of them, and what."""

    def __init__(self, pool, answers, scores=(), config=QUICK, episodes=None):
        self.pool = pool
        self.asked = []
        self.scored = []
        self._answers = iter(answers)
        self._scores = iter(scores)
        self.engine = RolloutEngine(
            client=SimpleNamespace(generate_samples=self.generate_samples),
            pool=pool,
            scorer=self,
            config=config,
            decode=lambda ids: ["".join(map(str, tokens)) for tokens in ids],
            episodes=episodes,
        )
        self.queue = PromptQueue(["p000"], seed=1, shuffle=False)

    async def generate_samples(self, url, stream, *, inputs, **more):
        (turn,) = self.pool.turns
        request, server, (index, samples) = turn.request, turn.server, next(self._answers)
        self.asked.append((request.prompt, server.weight_version, request.avoid, len(inputs)))
        self.inputs = inputs
        assert server.index == index
        if samples is SILENCE:
            request.silences += 1
            turn.move()
            await asyncio.Event().wait()
        return samples

    async def score(self, completions, prompt, *, whole_or_none=False, made=(), group=()):
        assert whole_or_none
        self.scored.append((list(completions), [one.token_ids for one in made], list(group)))
        return list(next(self._scores, [Score(value=1.0)] * len(completions)))

    async def batch(self, *, n_samples=2, version=0, **stream):
        made = self.engine.stream(
            self.queue, prompts(1), n_samples=n_samples, sampling=SAMPLING, concurrent_prompts=1, **stream
        )
        try:
            return await made.next_batch(1, version=version)
        finally:
            await made.close()

    def states(self):
        return [server.state for server in self.pool.servers()]


READY, SUSPECT, STALE = ServerState.READY, ServerState.SUSPECT, ServerState.STALE


async def scene(*answers, version=0, **more):
    return Scene(await pool_of(["url-0", "url-1"], version=version), answers, **more)


async def test_what_is_missing_is_asked_of_the_same_server_where_it_brought_some_and_else_of_another():
    now = await scene(
        (0, failed("timeout")),
        (1, failed("timeout", completions=[0], begun=[1])),
        (1, failed("timeout", begun=[0])),
        (0, whole(8)),
    )
    batch = await now.batch()
    assert now.asked == [
        ("p000", 0, "", 2),
        ("p000", 0, "server-0", 2),
        ("p000", 0, "", 1),
        ("p000", 0, "server-1", 1),
    ]
    assert [one.completion.token_ids for one in batch.rollouts] == [(7,), (6, 6, 8)]
    assert (batch.retried, batch.generated_tokens, batch.kept_tokens) == (3, 4, 3)
    assert now.states() == [READY, READY]


async def test_a_move_costs_no_attempt_and_each_silence_is_counted():
    config = dataclasses.replace(QUICK, request_retries=0)
    now = await scene((0, SILENCE), (0, SILENCE), (0, whole(7, 8)), config=config)
    batch = await now.batch()
    assert (batch.retried, batch.failed, batch.hedged) == (0, 0, 2)


async def test_silences_before_a_failure_are_counted_too():
    now = await scene((0, SILENCE), (0, failed("http_4xx", retryable=False)), (0, whole(7, 8)))
    batch = await now.batch()
    assert (batch.failed, batch.hedged) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        *((kind, SUSPECT) for kind in ("refused", "reset", "truncated")),
        *((kind, STALE) for kind in ("nonfinite", "impossible")),
        *((kind, READY) for kind in ("timeout", "aborted", "malformed")),
    ],
)
async def test_a_failure_that_says_something_of_its_server_is_told_to_the_pool(kind, state):
    now = await scene((0, failed(kind)), (1, whole(7, 8)))
    try:
        assert len((await now.batch()).rollouts) == 2
        assert now.states() == [state, READY]
    finally:
        await now.pool.close()


@pytest.mark.parametrize("answered", ["whole", "begun"])
async def test_tokens_of_other_weights_than_the_server_should_have_make_it_stale_and_are_asked_for_again(answered):
    other = made(9, version=3, finish_reason="stop" if answered == "whole" else "")
    given = {"completions": {}, "begun": {}, ("completions" if answered == "whole" else "begun"): {0: other}}
    now = await scene((0, Samples(failure=None, **given)), (1, whole(7)))
    batch = await now.batch(n_samples=1)
    assert now.pool.servers()[0].reason == "server-0 answered with weight version 3, not 0"
    assert now.states() == [STALE, READY]
    assert [one.completion.token_ids for one in batch.rollouts] == [(7,)]
    assert (batch.retried, batch.generated_tokens) == (1, 1)


async def test_one_that_can_not_be_tried_again_fails_the_group_at_once_and_names_why():
    config = dataclasses.replace(QUICK, prompt_attempts=1)
    now = await scene((0, failed("http_4xx", retryable=False)), config=config)
    with pytest.raises(RolloutError, match="it was http_4xx"):
        await now.batch()


async def test_ahead_of_the_trainer_the_newest_weights_are_asked_for():
    now = await scene((0, whole(7, 8, version=5)), version=5)
    await now.batch(ahead=1, newest=lambda: 5)
    assert now.asked == [("p000", 5, "", 2)]


async def test_what_is_whole_of_newer_weights_than_its_server_should_have_is_not_asked_for_again():
    """A request for nothing is refused, and cost the group what there was of it."""
    now = await scene((0, whole(7, 8, version=6)), version=5)
    batch = await now.batch(ahead=1, newest=lambda: 5)
    assert now.asked == [("p000", 5, "", 2)]
    assert now.states() == [STALE, READY]
    assert [one.completion.token_ids for one in batch.rollouts] == [(7,), (8,)]
    assert batch.failed == 0


async def test_what_a_state_kept_is_scored_and_not_asked_for():
    now = await scene()
    now.queue.keep(*now.queue.take_prompts(1), [made(7), made(8)])
    now.queue.load_state_dict(now.queue.state_dict())
    batch = await now.batch(ahead=1, newest=lambda: 0)
    assert now.asked == []
    assert now.scored == [(["7", "8"], [(7,), (8,)], [])]
    assert [one.reward for one in batch.rollouts] == [1.0, 1.0]


async def test_a_completion_without_an_answer_is_made_anew_and_takes_its_place():
    scores = [[Score(value=0.5), SILENT], [Score(value=0.25, parts={"a": 2.0})]]
    now = await scene((0, whole(7, 8)), (0, whole(9)), scores=scores)
    batch = await now.batch()
    assert now.scored == [(["7", "8"], [(7,), (8,)], []), (["9"], [(9,)], ["7", "9"])]
    assert [(one.completion.token_ids, one.text, one.reward, one.parts) for one in batch.rollouts] == [
        ((7,), "7", 0.5, {}),
        ((9,), "9", 0.25, {"a": 2.0}),
    ]
    assert (batch.unanswered, batch.failed) == (1, 0)


@pytest.mark.parametrize(
    ("scores", "asked", "error"),
    [
        ([[SILENT, BROKEN]], 1, "no answer"),  # what has failed is not worth another one
        ([[Score(value=1.0), BROKEN]], 1, "it raised"),
        ([[SILENT, SILENT], [Score(value=1.0), SILENT]], 2, "no answer"),
    ],
)
async def test_a_group_that_can_not_be_scored_fails_with_the_first_reason(scores, asked, error):
    answers = [(0, whole(7, 8)), (0, whole(7, 8))]
    now = await scene(*answers, scores=scores)
    now.engine._scored_by = "the scorer's log"
    stream = now.engine.stream(now.queue, prompts(1), n_samples=2, sampling=SAMPLING, concurrent_prompts=1)
    stream._attempts = 1
    with pytest.raises(RewardError, match=error):
        await stream.next_batch(1, version=0)
    assert len(now.asked) == asked


class Played:
    """One answer a sample, or none."""

    def __init__(self, error=None):
        self.error = error

    async def rollouts(self, prompt, samplings, complete):
        if self.error is not None:
            raise self.error
        return [Rollout(completion=await complete((1, 2, 3), one), text="", reward=1.0) for one in samplings]


async def test_each_answer_of_an_episode_is_one_request_and_of_its_prompt():
    now = await scene((0, whole(7)), (0, whole(8)), episodes=Played())
    batch = await now.batch()
    assert now.asked == [("p000", 0, "", 1)] * 2
    assert now.inputs == [(1, 2, 3)]
    assert [one.completion.token_ids for one in batch.rollouts] == [(7,), (8,)]


async def test_an_episode_that_fails_ends_the_run_as_a_reward_function_does():
    now = await scene(episodes=Played(EpisodeFailed("no tool")))
    with pytest.raises(RewardError, match="no tool") as raised:
        await now.batch()
    assert raised.value.hint == "rollout.episode and its log, trainer.log"
