"""SGLang's event stream of several completions of one prompt, taken apart as it arrives. No HTTP here.

    data: {"index": 3, …, "meta_info": {"finish_reason": null, …}}                 not whole yet: passed over
    data: {"index": 3, …, "meta_info": {"finish_reason": {"type": "stop"}, …}}     whole
    data: {"error": {"code": 400, "message": …}}                                   a refusal, after the 200 was sent
    data: [DONE]

A completion that has come stays, whatever becomes of the others: a server that dies costs what it had not finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from actors.serving.completion_answer import completion_from, malformed
from launcher.base.errors import RequestFailed
from launcher.base.rollouts import Completion

END = b"\n\n"
PREFIX = b"data: "
DONE = b"[DONE]"
RETRYABLE_4XX = frozenset({408, 429})


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The completions that came whole, by their place in the request; `failure` is None where all did."""

    completions: Mapping[int, Completion]
    failure: RequestFailed | None


class CompletionStream:
    """`feed` it what arrives, then ask `samples` once: what it had until then is what there is."""

    def __init__(self, n: int, *, server: str) -> None:
        self._n = n
        self._server = server
        self._rest = b""
        self._done = False
        self._whole: dict[int, Completion] = {}
        self._failure: RequestFailed | None = None

    def feed(self, data: bytes) -> None:
        *events, self._rest = (self._rest + data).split(END)
        for event in events:
            try:
                self._take(event)
            except RequestFailed as failure:  # of one completion; the others go on
                self._failure = self._failure or failure

    def samples(self, broken_off: RequestFailed | None = None) -> Samples:
        """`broken_off` is why nothing more came, where the stream didn't end by itself."""
        failure = self._failure or broken_off
        if failure is None and len(self._whole) < self._n:
            failure = self._incomplete()
        return Samples(completions=self._whole, failure=failure if len(self._whole) < self._n else None)

    def _take(self, event: bytes) -> None:
        if not event.startswith(PREFIX):
            raise malformed(self._server, f"no event of completions: {event[:80]!r}")
        content = event.removeprefix(PREFIX)
        if content == DONE:
            self._done = True
            return
        try:
            answer = orjson.loads(content)
            if "error" in answer:
                raise self._refusal(answer["error"])
            if answer["meta_info"]["finish_reason"] is not None:
                self._add(answer["index"], answer)
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise malformed(self._server, f"{error!r} in {content[:200]!r}") from error

    def _add(self, index: object, answer: dict[str, Any]) -> None:
        if type(index) is not int or not 0 <= index < self._n or index in self._whole:
            raise malformed(self._server, f"completion {index!r} of {self._n}, or that one twice")
        self._whole[index] = completion_from(answer, server=self._server)

    def _refusal(self, said: dict[str, Any]) -> RequestFailed:
        return refusal(f"POST {self._server}/generate", said["code"], str(said["message"]))

    def _incomplete(self) -> RequestFailed:
        if self._rest and not self._whole and not self._done:
            return malformed(self._server, f"no event of completions: {self._rest[:80]!r}")
        what = f"{self._server} ended its answer with {len(self._whole)} of {self._n} completions"
        return RequestFailed(what, kind="malformed" if self._done else "truncated")


def refusal(where: str, status: int, said: str) -> RequestFailed:
    """An HTTP status of 400 and more, which SGLang may also write into a stream."""
    return RequestFailed(
        f"{where}: HTTP {status} {said}",
        kind="http_5xx" if status >= 500 else "http_4xx",
        retryable=status >= 500 or status in RETRYABLE_4XX,
    )
