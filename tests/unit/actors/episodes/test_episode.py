"""What an episode is recorded as: cut where its room or its turns ended before its agent did."""

import pytest

from actors.episodes.chat_request import ChatRequest
from actors.episodes.episode import Episode
from actors.episodes.turn_tokens import TurnTokens
from actors.serving.sglang_client import Sampling
from launcher.base.rollouts import Completion, Prompt, RolloutBatch, RolloutGroup
from launcher.config.data import ChatConfig
from launcher.config.schema import GenerationConfig
from launcher.policy.admission import BatchReport
from tests.support.episodes import chat_templates

SAMPLING = Sampling.from_config(GenerationConfig(max_new_tokens=6))
QUESTION = {"role": "user", "content": "1+2=?"}


class OneEpisode:
    """Each answer has the digits `3` that it is allowed, at most `words`, and the end mark where there is room."""

    def __init__(self, *, longest, max_turns, words=2):
        tokenizer = chat_templates.tokenizer()
        (self._digit,) = tokenizer("3", add_special_tokens=False)["input_ids"]
        self._end = tokenizer.eos_token_id
        self._words = words
        self.episode = Episode(
            TurnTokens(tokenizer, ChatConfig()),
            self._complete,
            SAMPLING,
            longest=longest,
            max_turns=max_turns,
            record=[],
        )

    async def _complete(self, token_ids, sampling):
        made = ([self._digit] * self._words + [self._end])[: sampling.max_new_tokens]
        finish = "stop" if made[-1] == self._end else "length"
        return Completion(
            token_ids=tuple(made), logprobs=(-0.1,) * len(made), weight_version=0, finish_reason=finish, server="a"
        )

    async def ask(self, *messages, most=None):
        asked = ChatRequest(messages=messages, tools=(), max_tokens=most, is_streamed=False, model="m")
        return await self.episode.answer(asked)

    async def chat(self, turns):
        """A question after each answer; the finish reasons that the agent saw."""
        messages, seen = [QUESTION], []
        for _ in range(turns):
            answer = await self.ask(*messages)
            seen.append(answer.finish_reason)
            messages += [answer.message, QUESTION]
        return seen

    @property
    def recorded(self):
        return self.episode.rollout(0.0, {}).completion.finish_reason


async def test_an_episode_that_ends_by_itself_is_no_cut_one():
    one = OneEpisode(longest=200, max_turns=2)
    assert await one.chat(2) == ["stop", "stop"]
    assert one.recorded == "stop"


async def test_an_episode_that_had_no_further_turn_was_cut():
    one = OneEpisode(longest=200, max_turns=2)
    assert await one.chat(3) == ["stop", "stop", "length"]
    assert one.recorded == "length"


async def test_an_episode_whose_chat_fills_the_context_was_cut():
    one = OneEpisode(longest=24, max_turns=9)
    assert await one.chat(2) == ["stop", "length"]
    assert one.recorded == "length"


async def test_an_answer_that_the_context_cuts_is_a_cut_episode_whatever_is_answered_after_it():
    asked = (await OneEpisode(longest=200, max_turns=9).ask(QUESTION)).prompt_tokens
    longer = {"role": "user", "content": QUESTION["content"] + "1"}
    one = OneEpisode(longest=asked + 6, max_turns=9, words=5)
    assert (await one.ask(longer)).finish_reason == "length", "its sixth token had no room"
    assert (await one.ask(QUESTION)).finish_reason == "stop"
    assert one.recorded == "length"


async def test_an_answer_that_its_agent_wanted_short_cuts_no_episode_that_goes_on():
    one = OneEpisode(longest=200, max_turns=9)
    assert (await one.ask(QUESTION, most=1)).finish_reason == "length"
    assert (await one.ask(QUESTION)).finish_reason == "stop"
    assert one.recorded == "stop"


@pytest.mark.parametrize(("turns", "share"), [(2, 0.0), (3, 1.0)])
async def test_the_gate_counts_an_episode_that_was_cut(turns, share):
    one = OneEpisode(longest=200, max_turns=2)
    await one.chat(turns)
    prompt = Prompt(id="p", token_ids=(1,), record={"question": "?", "answer": "3"})
    group = RolloutGroup(prompt=prompt, rollouts=(one.episode.rollout(1.0, {}),))
    batch = RolloutBatch(groups=(group,), failed=0, retried=0, generated_tokens=3, seconds=1.0)
    assert BatchReport.of(batch, policy_version=0, n_samples=1).truncated_share == share
