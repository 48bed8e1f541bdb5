"""SGLang's answers to /generate as Completions: one JSON answer, or an event stream of several. No HTTP here.

    data: {"index": 3, …, "meta_info": {"finish_reason": null, …}}                 its next tokens
    data: {"index": 3, …, "meta_info": {"finish_reason": {"type": "stop"}, …}}     its last tokens: complete
    data: {"error": {"code": 400, "message": …}}                                   a refusal, after the 200 was sent
    data: [DONE]

Everything that could make a failure look like a completion is checked here: this is the last place that can tell an
empty or damaged answer from a bad one, which would be scored 0 and trained on. Tokens that have arrived are kept
whatever becomes of the others: a server that dies costs only what it had not sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from launcher.base.errors import RequestFailed
from launcher.base.rollouts import Completion

FINISHED = frozenset({"stop", "length"})
UNFINISHED = ""
"""The finish_reason of a part of a completion."""
NOT_ITS_TOKENS = frozenset({"refused", "reset", "truncated", "timeout", "aborted", "http_5xx", "moved"})
"""Failures that say nothing against the tokens that came before them."""
END = b"\n\n"
PREFIX = b"data: "
DONE = b"[DONE]"
RETRYABLE_4XX = frozenset({408, 429})


def malformed(server: str, what: str) -> RequestFailed:
    return RequestFailed(f"{server} answered 200 with something else: {what}", kind="malformed")


def _number(logprob: Any) -> float:
    """SGLang's JSON encoder writes null for what is not a number."""
    return math.nan if logprob is None else float(logprob)


def completion_from(
    answer: Mapping[str, Any],
    *,
    server: str,
    is_part: bool = False,
    vocabulary: int | None = None,
    labels: dict[str, int] | None = None,
) -> Completion:
    """`is_part`: it may be UNFINISHED. `vocabulary`: how many tokens the model has, where that is known. `labels`: of
    another's server, whose weight versions are any text: numbered here as they come. Raises RequestFailed: aborted,
    empty, nonfinite, impossible or malformed."""
    try:
        meta = answer["meta_info"]
        finish = UNFINISHED if is_part and meta["finish_reason"] is None else meta["finish_reason"]["type"]
        token_ids = tuple(answer["output_ids"])
        if finish == "abort":
            said = meta["finish_reason"].get("message", "no reason given")
            raise RequestFailed(f"{server} aborted the request after {len(token_ids)} tokens: {said}", kind="aborted")
        if not token_ids:
            raise RequestFailed(f"{server} answered 200 with no tokens", kind="empty")
        logprobs = tuple(_number(entry[0]) for entry in meta["output_token_logprobs"])
        scored_ids = tuple(entry[1] for entry in meta["output_token_logprobs"])
        label = meta["weight_version"]
        weight_version = int(label) if labels is None else labels.setdefault(str(label), len(labels))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise malformed(server, f"{error!r} in {str(answer)[:200]}") from error
    if finish not in FINISHED and not (is_part and finish == UNFINISHED):
        raise malformed(server, f"finish_reason {finish!r}")
    if scored_ids != token_ids or not all(type(token) is int for token in token_ids):
        raise malformed(server, f"log-probs of {len(scored_ids)} tokens for {len(token_ids)}, or of other ones")
    if not all(map(math.isfinite, logprobs)):
        raise RequestFailed(f"{server} answered with log-probs that are not finite", kind="nonfinite")
    least, most = min(token_ids), max(token_ids)
    if least < 0 or (vocabulary is not None and most >= vocabulary):  # the trainer's process would end of it
        what = f"{server} answered with token {least if least < 0 else most}"
        raise RequestFailed(f"{what}, and the model has {vocabulary or 'none below 0'}", kind="impossible")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        weight_version=weight_version,
        finish_reason=finish,
        server=server,
    )


def joined(begun: Completion, rest: Completion) -> Completion:
    """`rest` continues `begun`. Where they are of two servers, `server` names both: the tokens are neither's alone."""
    runs = [*begun.runs, *rest.runs]
    versions = [
        (version, sum(tokens for _, tokens in same))
        for version, same in itertools.groupby(runs, key=lambda run: run[0])
    ]
    return Completion(
        token_ids=begun.token_ids + rest.token_ids,
        logprobs=begun.logprobs + rest.logprobs,
        weight_version=min(begun.weight_version, rest.weight_version),
        versions=tuple(versions) if len(versions) > 1 else (),
        finish_reason=rest.finish_reason,
        server=rest.server if rest.server == begun.server else f"{begun.server} {rest.server}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What arrived, by its place in the request; `failure` is None where all is complete.

    `begun`: what there is of the others, with finish_reason UNFINISHED, for another server to continue.
    """

    completions: Mapping[int, Completion]
    failure: RequestFailed | None
    begun: Mapping[int, Completion] = field(default_factory=dict)


class CompletionStream:
    """Call `feed` with what arrives, then `samples`. `heard` is called whenever tokens have arrived; `vocabulary`: as
    of `completion_from`."""

    def __init__(self, n: int, *, server: str, heard: Callable[[], None] = lambda: None) -> None:
        self.vocabulary: int | None = None
        self._n = n
        self._heard = heard
        self._server = server
        self._rest = b""
        self._done = False
        self._complete: dict[int, Completion] = {}
        self._begun: dict[int, Completion] = {}
        self._failure: RequestFailed | None = None

    def feed(self, data: bytes) -> None:
        *events, self._rest = (self._rest + data).split(END)
        if events:
            self._heard()
        for event in events:
            try:
                self._take_event(event)
            except RequestFailed as failure:  # of one completion; the others continue
                self._failure = self._failure or failure

    def samples(self, broken_off: RequestFailed | None = None) -> Samples:
        """`broken_off`: why the stream ended early, where it did."""
        failure = self._failure or broken_off
        if failure is None and len(self._complete) < self._n:
            failure = self._incomplete()
        if len(self._complete) == self._n or failure is None:
            return Samples(completions=self._complete, failure=None)
        begun = self._begun if failure.kind in NOT_ITS_TOKENS else {}
        return Samples(completions=self._complete, failure=failure, begun=begun)

    def _take_event(self, event: bytes) -> None:
        if not event.startswith(PREFIX):
            raise malformed(self._server, f"no event of completions: {event[:80]!r}")
        content = event.removeprefix(PREFIX)
        if content == DONE:
            self._done = True
            return
        try:
            answer = orjson.loads(content)
            if "error" in answer:
                said = answer["error"]
                raise refusal(f"POST {self._server}/generate", said["code"], str(said["message"]))
            self._add(answer["index"], answer)
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise malformed(self._server, f"{error!r} in {content[:200]!r}") from error

    def _add(self, index: object, answer: dict[str, Any]) -> None:
        if type(index) is not int or not 0 <= index < self._n or index in self._complete:
            raise malformed(self._server, f"completion {index!r} of {self._n}, or that one twice")
        completion = completion_from(answer, server=self._server, is_part=True, vocabulary=self.vocabulary)
        n_tokens = answer["meta_info"]["completion_tokens"]
        if (before := self._begun.get(index)) is not None:
            if before.weight_version != completion.weight_version:
                raise malformed(self._server, f"completion {index} of two weight versions")
            if n_tokens > len(completion.token_ids):  # not where each event has all the tokens so far
                completion = joined(before, completion)
        if n_tokens != len(completion.token_ids):
            raise malformed(self._server, f"{len(completion.token_ids)} tokens of completion {index}, not {n_tokens}")
        self._begun.pop(index, None)
        (self._begun if completion.finish_reason == UNFINISHED else self._complete)[index] = completion

    def _incomplete(self) -> RequestFailed:
        if self._rest and not self._complete and not self._done:
            return malformed(self._server, f"no event of completions: {self._rest[:80]!r}")
        what = f"{self._server} ended its answer with {len(self._complete)} of {self._n} completions"
        return RequestFailed(what, kind="malformed" if self._done else "truncated")


def refusal(where: str, status: int, said: str) -> RequestFailed:
    """An HTTP status of 400 and more, which SGLang may also write into a stream."""
    return RequestFailed(
        f"{where}: HTTP {status} {said}",
        kind="http_5xx" if status >= 500 else "http_4xx",
        retryable=status >= 500 or status in RETRYABLE_4XX,
    )
