"""Agents in processes of their own on real HTTP servers: recorded to the token, no reward where they fail."""

import asyncio
import contextlib
import os
import signal
from collections import Counter

import aiohttp
import pytest

from actors.data.prompt_queue import PromptQueue
from actors.episodes.episode_runner import EpisodeRunner
from actors.episodes.turn_tokens import TurnTokens
from actors.model.micro_batches import sequences_of
from actors.rollout.rollout_engine import RolloutEngine
from actors.serving.sglang_client import Sampling, SGLangClient
from launcher.base.errors import RewardError, RewardImportError
from launcher.base.rollouts import Prompt
from launcher.config.data import ChatConfig
from launcher.config.schema import GenerationConfig
from tests.programs import stand_in_server
from tests.support.episodes import chat_templates
from tests.support.fault_proxy import FaultProxy
from tests.support.machine import scaled
from tests.support.ready_servers import pool_of
from tests.support.worlds.episodes import config_of

pytestmark = pytest.mark.timeout(300)  # each starts processes that import a client
SAMPLING = Sampling.from_config(GenerationConfig(max_new_tokens=6))


@pytest.fixture(scope="module")
def server():
    with stand_in_server.running("--weight-version", "0", "--model-path", str(chat_templates.MODEL)) as url:
        yield url


@contextlib.asynccontextmanager
async def engine(url, config, *, longest=200):
    """The engine, and the runner."""
    async with SGLangClient() as client:

        async def probe(where):
            return (await client.model_info(where, timeout_s=5)).weight_version

        pool = await pool_of([url], probe=probe)
        tokens = TurnTokens(chat_templates.tokenizer(), ChatConfig())
        runner = EpisodeRunner(config, tokens, longest=longest)
        await runner.start()
        try:
            yield (
                RolloutEngine(
                    client=client,
                    pool=pool,
                    scorer=None,
                    config=config.rollout,
                    decode=lambda ids: [str(i) for i in ids],
                    episodes=runner,
                ),
                runner,
            )
        finally:
            await runner.close()
            await pool.close()


def prompts(n, **more):
    return {
        f"p{i}": Prompt(id=f"p{i}", token_ids=(1, 2, 3), record={"question": f"{i}+1=?", "answer": "1", **more})
        for i in range(n)
    }


async def collect(rollouts, items, *, n_samples=2):
    queue = PromptQueue([*items], seed=1, shuffle=False)
    batch = await rollouts.collect_batch(
        queue,
        items,
        want=len(items),
        n_samples=n_samples,
        sampling=SAMPLING,
        weight_version=0,
        concurrent_prompts=4,
    )
    return batch, queue


def play(url, agent, *, n=1, n_samples=2, longest=200, more=None, **settings):
    async def scenario():
        async with engine(url, config_of(agent, **settings), longest=longest) as (rollouts, _):
            return await collect(rollouts, prompts(n, **(more or {})), n_samples=n_samples)

    return asyncio.run(scenario())[0]


def test_episodes_are_divided_among_the_processes_from_the_first_batch_on(server):
    """While the processes imported, all chose the first one."""
    batch = play(server, "names_its_process", n=2, n_samples=3, episode_workers=2)
    pids = Counter(rollout.parts["pid"] for rollout in batch.rollouts)
    assert sorted(pids.values()) == [3, 3]


def test_two_turns_are_one_sequence_of_what_the_server_made_and_what_the_template_wrote_between(server):
    batch = play(server, "two_turns", n=2)
    tokenizer = chat_templates.tokenizer()
    assert len(batch.rollouts) == 4
    for group in batch.groups:
        for rollout in group.rollouts:
            assert rollout.turns == 2
            assert set(rollout.parts) == {"first", "second"}
            assert rollout.reward == sum(rollout.parts.values())
            (segment,) = rollout.segments
            tokens, own = segment.completion.token_ids, segment.own
            made = tuple(token for token, is_own in zip(tokens, own, strict=True) if is_own)
            assert made == rollout.completion.token_ids
            between = tokenizer.decode([t for t, is_own in zip(tokens, own, strict=True) if not is_own])
            assert between.endswith("<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n")
            asked = f"<|im_start|>user\n{group.prompt.record['question']}<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode(list(segment.prompt)) == asked
    assert sum(len(one.places) for one in sequences_of(batch.groups)) == batch.generated_tokens


@pytest.mark.slow
def test_branches_and_an_edited_history_are_sequences_of_their_own(server):
    (rollout,) = play(server, "branches", n_samples=1).rollouts
    assert (rollout.turns, len(rollout.segments)) == (4, 4)
    assert len({segment.prompt for segment in rollout.segments[:3]}) == 1
    assert all(all(segment.own) for segment in rollout.segments)


@pytest.mark.slow
def test_an_agent_with_a_client_of_its_own_needs_no_change(server):
    (rollout,) = play(server, "Agent", n_samples=1).rollouts
    assert len(rollout.completion.token_ids) <= 2  # its own limit
    assert rollout.reward in {0.0, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("raises", "KeyError: 'spoon'"),
        ("silent", "silent gave no answer (None)"),
        ("not_a_number", "not_a_number answered nan, which is not finite"),
        ("asks_nothing", "without an answer of the model"),
        ("out_of_order", "after the system message the user speaks first"),
        ("endless_turns", "asked for 17 answers, rollout.max_turns=4"),
        ("cancels_itself", "CancelledError"),
        ("is_cancelled", "CancelledError"),
    ],
)
def test_an_episode_without_a_reward_is_no_zero_and_ends_the_run_by_name(server, agent, said):
    with pytest.raises(RewardError) as failed:
        play(server, agent, n_samples=1)
    assert said in failed.value.message
    assert "rollout.episode" in failed.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "said"),
    [("sleeps", "took longer than rollout.episode_timeout={:g} s"), ("hangs", "kept its process from all else")],
)
def test_an_episode_that_never_ends_costs_its_time_limit(server, agent, said):
    limit_s = round(scaled(1.0), 1)
    with pytest.raises(RewardError, match=said.format(limit_s)):
        play(server, agent, n_samples=1, episode_timeout=limit_s, prompt_attempts=1)


@pytest.mark.slow
def test_an_episode_that_was_overdue_is_run_anew_and_costs_no_group(server, tmp_path):
    batch = play(server, "overdue_once", more={"flag": str(tmp_path / "late")}, episode_timeout=scaled(1.0))
    assert (len(batch.rollouts), batch.failed) == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "seconds", "said"),
    [
        ("ends_its_process", 60.0, "p0.* the process of the episodes ended: exit code 9"),
        ("blocks", 2.0, "p0.* kept its process from all else"),
        ("blocks_in_a_task", 2.0, "took longer than rollout.episode_timeout={:g} s"),
    ],
)
def test_who_ends_or_blocks_the_process_fails_and_nobody_beside_it(server, agent, seconds, said):
    limit_s = round(scaled(seconds), 1)
    with pytest.raises(RewardError, match=said.format(limit_s)):
        play(server, agent, n=4, episode_timeout=limit_s, prompt_attempts=2)


@pytest.mark.slow
def test_an_agent_may_close_its_client(server):
    assert len(play(server, "closes", n=3).rollouts) == 6


@pytest.mark.slow
def test_of_many_requests_at_once_no_more_than_max_turns_are_answered(server):
    (rollout,) = play(server, "fifty_at_once", n_samples=1).rollouts
    assert (rollout.turns, rollout.reward) == (4, 4.0)


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "is_replaced"), [("keeps", True), ("loads", False)])
def test_a_process_that_has_grown_is_replaced_when_its_episodes_have_ended(server, agent, is_replaced):
    async def scenario():
        config = config_of(agent)
        config.reward.max_growth_gb = 0.08
        async with engine(server, config) as (rollouts, runner):
            made = [(await collect(rollouts, prompts(1)))[0] for _ in range(3)]
            return made, len(runner._processes._processes)

    made, processes = asyncio.run(scenario())
    assert (len({one.parts["process"] for batch in made for one in batch.rollouts}) > 1) == is_replaced
    assert (processes, [batch.failed for batch in made]) == (1, [0, 0, 0])


@pytest.mark.slow
def test_a_process_that_ends_is_replaced_and_its_episodes_are_run_anew(server, tmp_path):
    batch = play(server, "dies_once", n=2, more={"flag": str(tmp_path / "died")})
    assert (tmp_path / "died").exists()
    assert (len(batch.rollouts), batch.failed) == (4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [True, False], ids=["its process ended", "it raised"])
def test_answers_are_kept_where_the_process_ended_and_made_anew_where_the_agent_failed(server, tmp_path, dies):
    batch = play(server, "fails_between", n_samples=1, more={"flag": str(tmp_path / "said"), "dies": dies})
    (rollout,) = batch.rollouts
    assert (rollout.turns, rollout.reward) == (2, float(dies))
    assert (batch.generated_tokens == len(rollout.completion.token_ids)) is dies


async def test_a_killed_process_costs_no_prompt(server):
    async with engine(server, config_of("two_turns")) as (rollouts, runner):
        collecting = asyncio.create_task(collect(rollouts, prompts(6)))
        process = runner._processes.at(0)
        await process.ready()
        os.kill(process.pid, signal.SIGKILL)
        batch, queue = await collecting
    queue.commit(batch.prompt_ids)
    assert len(batch.groups) == 6
    assert queue.epoch == 1


@pytest.mark.slow
async def test_a_fifth_of_all_requests_spoiled_costs_no_episode(server):
    async with FaultProxy(server, share=0.2, seed=5) as proxy, engine(proxy.url, config_of("two_turns")) as made:
        batch = (await collect(made[0], prompts(12)))[0]
    assert sum(proxy.fired.values()) > 0
    assert len(batch.rollouts) == 24
    assert all(rollout.turns == 2 and rollout.reward is not None for rollout in batch.rollouts)


@pytest.mark.slow
def test_a_chat_that_fills_the_context_is_answered_empty_and_not_cut_by_a_failure(server):
    (rollout,) = play(server, "two_turns", n_samples=1, longest=24).rollouts
    assert rollout.turns == 1
    assert all(len(segment.prompt) + len(segment.completion.token_ids) <= 24 for segment in rollout.segments)


@pytest.mark.slow
async def test_an_agent_at_work_is_progress(server):
    async with engine(server, config_of("sleeps")) as (rollouts, runner):
        collecting = asyncio.create_task(collect(rollouts, prompts(1)))
        while runner.progress < 2:
            await asyncio.sleep(0.05)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)


async def test_a_key_opens_one_episode_while_it_lasts(server):
    async with engine(server, config_of("two_turns")) as (_, runner), aiohttp.ClientSession() as session:
        answers = []
        for headers in ({}, {"Authorization": "Bearer guessed"}):
            async with session.post(runner._door.url + "/chat/completions", json={}, headers=headers) as answer:
                answers.append((answer.status, answer.headers["x-should-retry"]))
        url = runner._door.url
    assert answers == [(401, "false")] * 2
    assert url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("nobody", "has no 'nobody'"),
        ("not_async", "is not async"),
        ("too_many", "can't be called: missing a required argument: 'surprise'"),
    ],
)
def test_a_function_that_can_t_play_is_refused(server, agent, said):
    with pytest.raises(RewardImportError, match=said):
        play(server, agent)


@pytest.mark.slow
def test_episodes_are_played_ahead_of_the_trainer_and_anew_after_a_resume(server):
    """A state has no rewards, and an episode's can't be had without playing it."""

    async def scenario():
        async with engine(server, config_of("two_turns")) as (rollouts, _):
            items = prompts(4)
            queue = PromptQueue([*items], seed=1, shuffle=False)
            stream = rollouts.stream(
                queue, items, n_samples=2, sampling=SAMPLING, concurrent_prompts=4, ahead=1, newest=lambda: 0
            )
            first = await stream.next_batch(2, version=0)
            assert first.prompt_ids == ("p0", "p1")
            assert queue.in_flight == ("p0", "p1", "p2", "p3")
            while not all(task.done() for task in stream._running):
                await asyncio.sleep(0.01)
            state = queue.state_dict()
            queue.commit(first.prompt_ids)
            second = await stream.next_batch(2, version=0)
            assert second.seconds < second.generating_s
            return first, second, state

    first, second, state = asyncio.run(scenario())
    assert second.prompt_ids == ("p2", "p3")
    assert all(rollout.turns == 2 for rollout in (*first.rollouts, *second.rollouts))
    assert state["first"] == ["p0", "p1", "p2", "p3"]
    assert "kept" not in state
