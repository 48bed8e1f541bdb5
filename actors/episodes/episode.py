"""One episode: what its agent asks and the model answers, recorded as turns; and the time that its own code takes.

The record is of tokens alone (actors/episodes/transcript.py). A request that has no room left, or comes after
`rollout.max_turns` answers, is answered with an empty text and the finish reason `length`, as agents know it. The
episode then counts as cut, and so does one with an answer that filled its room: its agent did not get to its end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from actors.episodes.chat_request import LENGTH, BadRequest, ChatAnswer, ChatRequest
from actors.episodes.transcript import Turn, find_turn, segments_of, whole_completion
from actors.episodes.turn_tokens import TurnTokens, Unwritable
from actors.serving.sglang_client import Sampling
from launcher.base.rollouts import Completion, Rollout

Complete = Callable[[tuple[int, ...], Sampling], Awaitable[Completion]]
"""One answer of a server, with the retries of a rollout."""

ENDLESS = 4
"""So many times `rollout.max_turns` requests show an agent that doesn't look at the answers."""


class EpisodeFailed(Exception):
    """It has no reward."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Said:
    """A request, and what the model answered to it."""

    request: ChatRequest
    answer: ChatAnswer
    turn: Turn


class Episode:
    """Used on one asyncio loop. `broken` fails where no answer can be given; `longest`: tokens of one sequence.

    `record`: what was said when this sample was played before. A request that is repeated gets that answer, once."""

    def __init__(
        self,
        tokens: TurnTokens,
        complete: Complete,
        sampling: Sampling,
        *,
        longest: int,
        max_turns: int,
        record: list[Said],
    ) -> None:
        self._tokens = tokens
        self._complete = complete
        self._sampling = sampling
        self._longest = longest
        self._max_turns = max_turns
        self._record = record
        self._said: list[Said] = []
        self._asked = self._in_flight = 0
        self._is_refused = False
        self._own_s = 0.0
        self._since = time.monotonic()
        self._answering: set[asyncio.Task[Completion]] = set()
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_asking(self) -> bool:
        return self._in_flight > 0

    @property
    def own_s(self) -> float:
        """Seconds in which the model was asked nothing."""
        return self._own_s if self._in_flight else self._own_s + time.monotonic() - self._since

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Raises BadRequest; what fails otherwise fails `broken` too."""
        self._asked += 1
        if self._asked > ENDLESS * self._max_turns:
            self._break(EpisodeFailed(f"asked for {self._asked} answers, rollout.max_turns={self._max_turns}"))
        if self.broken.done():
            raise BadRequest("the episode is over")
        self._own_s = self.own_s
        self._in_flight = self._in_flight + 1
        try:
            return await self._answer(request)
        finally:
            self._in_flight -= 1
            self._since = time.monotonic()

    async def _answer(self, request: ChatRequest) -> ChatAnswer:
        before = find_turn(self._turns, request.messages, request.tools)
        given = self._given(before, request)
        known = () if before is None else before.token_ids
        token_ids = known + given
        room = self._longest - len(token_ids)
        if room < 1 or len(self._turns) + len(self._answering) >= self._max_turns:
            self._is_refused = True
            return ChatAnswer.of("", LENGTH, has_tools=False, prompt_tokens=len(token_ids), tokens=0)
        for said in self._record:
            if said.request == request and said.turn.before is before and said not in self._said:
                self._said.append(said)
                return said.answer
        completion = await self._made(token_ids, self._limited(min(room, request.max_tokens or room)))
        answer = ChatAnswer.of(
            self._tokens.answer_text(completion.token_ids),
            completion.finish_reason,
            has_tools=bool(request.tools),
            prompt_tokens=len(token_ids),
            tokens=len(completion.token_ids),
        )
        messages = (*request.messages, answer.message)
        turn = Turn(before=before, messages=messages, tools=request.tools, given=given, completion=completion)
        said = Said(request=request, answer=answer, turn=turn)
        self._record.append(said)
        self._said.append(said)
        return answer

    @property
    def _turns(self) -> list[Turn]:
        return [said.turn for said in self._said]

    @property
    def _is_cut(self) -> bool:
        """By its room or by its turns. An answer that its agent asked to be short is none of these."""
        cut = [turn for turn in self._turns if turn.completion.finish_reason == LENGTH]
        return self._is_refused or any(len(turn.token_ids) >= self._longest for turn in cut)

    def _given(self, before: Turn | None, request: ChatRequest) -> tuple[int, ...]:
        try:
            if before is None:
                return self._tokens.opening(request.messages, request.tools)
            new = request.messages[len(before.messages) :]
            return self._tokens.following(before.completion.token_ids[-1], new, request.tools)
        except Unwritable as error:
            raise BadRequest(f"the chat template can't write these messages: {error}") from error

    def _limited(self, most: int) -> Sampling:
        new = min(self._sampling.max_new_tokens, most)
        least = min(self._sampling.min_new_tokens, new)
        return dataclasses.replace(self._sampling, max_new_tokens=new, min_new_tokens=least)

    async def _made(self, token_ids: tuple[int, ...], sampling: Sampling) -> Completion:
        task = asyncio.ensure_future(self._complete(token_ids, sampling))
        self._answering.add(task)
        try:
            return await task
        except Exception as error:
            self._break(error)  # the agent hears of it only as a request that failed
            raise
        finally:
            self._answering.discard(task)

    def _break(self, error: Exception) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)

    def close(self) -> None:
        """No answers any more; those under way are cancelled."""
        for task in self._answering:
            task.cancel()
        if not self.broken.cancel() and not self.broken.cancelled():
            self.broken.exception()  # whoever plays it may have ended before

    def rollout(self, reward: float, parts: Mapping[str, float]) -> Rollout:
        """Raises EpisodeFailed where the model was asked nothing."""
        if not self._turns:
            raise EpisodeFailed("ended without an answer of the model: there is nothing to learn from")
        segments = segments_of(self._turns)
        texts = [self._tokens.answer_text(segment.completion.token_ids) for segment in segments]
        whole = whole_completion(self._turns)
        return Rollout(
            completion=dataclasses.replace(whole, finish_reason=LENGTH) if self._is_cut else whole,
            text="\n\n".join(texts),
            reward=reward,
            parts=parts,
            segments=segments,
            turns=len(self._turns),
        )
