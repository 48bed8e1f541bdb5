"""The record of an episode: a tree of turns, each with the tokens that were sent and the answer as it was generated.

    root ─ given₁ answer₁ ─┬─ given₂ answer₂        one sequence: given₁ answer₁ given₂ answer₂
                           └─ given₃ answer₃        a branch: its answer₁ is trained on in the sequence above

A turn is continued where a client's messages begin with the turn's own. An edited history matches no turn, so a new
root begins. What the model wrote is never decoded and encoded again. Pure: no HTTP, no tokenizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.base.rollouts import Completion, Segment

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One answer of the model. `messages`: the chat up to it, and itself; `given`: the tokens between the turn before
    and the answer, which count as of its weights. `tools`: as the client gave them."""

    before: Turn | None
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    given: tuple[int, ...]
    completion: Completion

    @property
    def path(self) -> list[Turn]:
        """From the root to this turn."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return turns[::-1]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens up to the end of the answer."""
        return tuple(token for turn in self.path for token in (*turn.given, *turn.completion.token_ids))


def find_turn(turns: Sequence[Turn], messages: Sequence[Message], tools: Sequence[Message]) -> Turn | None:
    """The turn that `messages` continue: the longest whose own they begin with. None: a new root."""
    begun = [
        turn
        for turn in turns
        if turn.tools == tuple(tools)
        and len(turn.messages) < len(messages)
        and all(_is_same(ours, theirs) for ours, theirs in zip(turn.messages, messages, strict=False))
    ]
    return max(begun, key=lambda turn: len(turn.messages), default=None)


def segments_of(turns: Sequence[Turn]) -> tuple[Segment, ...]:
    """The sequences that an episode is trained on, one for each turn that none continues. Each answer counts once."""
    continued = {id(turn.before) for turn in turns}
    counted: set[int] = set()
    segments = []
    for leaf in turns:
        if id(leaf) in continued:
            continue
        tokens: list[int] = []
        logprobs: list[float] = []
        own: list[bool] = []
        versions: list[int] = []
        for turn in leaf.path:
            is_new = id(turn) not in counted
            counted.add(id(turn))
            for part, is_own in ((turn.given, False), (turn.completion.token_ids, is_new)):
                tokens += part
                own += [is_own] * len(part)
                logprobs += turn.completion.logprobs if is_own else [0.0] * len(part)
            of_answer = _versions(turn.completion)
            versions += [of_answer[0]] * len(turn.given) + of_answer
        first = own.index(True)
        segments.append(
            Segment(
                prompt=tuple(tokens[:first]),
                completion=_joined(
                    [turn.completion for turn in leaf.path], tokens[first:], logprobs[first:], versions[first:]
                ),
                own=tuple(own[first:]),
            )
        )
    return tuple(segments)


def whole_completion(turns: Sequence[Turn]) -> Completion:
    """All that the model made in an episode, in the order of its turns. It ended as its last answer did."""
    made = [turn.completion for turn in turns]
    tokens = [token for completion in made for token in completion.token_ids]
    logprobs = [value for completion in made for value in completion.logprobs]
    return _joined(made, tokens, logprobs, [version for completion in made for version in _versions(completion)])


def _versions(completion: Completion) -> list[int]:
    """Of each token."""
    return [version for version, tokens in completion.runs for _ in range(tokens)]


def _joined(
    made: Sequence[Completion], tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
) -> Completion:
    """`versions` of each token; `server` names all who made a part."""
    runs = tuple((version, len(list(same))) for version, same in itertools.groupby(versions))
    return Completion(
        token_ids=tuple(tokens),
        logprobs=tuple(logprobs),
        weight_version=min(versions),
        versions=runs if len(runs) > 1 else (),
        finish_reason=made[-1].finish_reason,
        server=" ".join(dict.fromkeys(name for completion in made for name in completion.server.split())),
    )


def _is_same(ours: Message, theirs: Message) -> bool:
    """Of an answer what the model said, whatever a client adds to the message; of others all."""
    if ours.get("role") != "assistant" or theirs.get("role") != "assistant":
        return ours == theirs
    return (ours.get("content") or "", _calls(ours)) == (theirs.get("content") or "", _calls(theirs))


def _calls(message: Message) -> list[object]:
    calls = message.get("tool_calls")
    return [(call.get("id"), call.get("function")) for call in calls] if isinstance(calls, list) else []
