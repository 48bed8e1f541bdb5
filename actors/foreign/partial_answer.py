"""One completion of another project's trainer, made by one server or, where that was lost, continued by others.

    request ─► events of its tokens ─► (server lost) ─► request for what is missing, token in, token out ─► one answer

The answer has the shape of SGLang's own to a request that is not streamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from actors.serving.completions import malformed

USUAL_TOKENS = 128
"""SGLang's `max_new_tokens` where a request names none."""
DEPENDS_ON_ITS_OUTPUT: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "stop": (None, "", []),
    "stop_regex": (None, "", []),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "custom_params"), (None,)),
}
"""Sampling parameters with the values under which a completion can be continued as if it were a prompt."""
NOT_JOINED = frozenset(
    (
        *("text", "input_embeds", "image_data", "audio_data", "video_data", "top_logprobs_num", "token_ids_logprob"),
        *("return_hidden_states", "return_routed_experts", "return_prompt_token_ids", "custom_logit_processor"),
    )
)
"""What a request may not ask for: its parts would not add up. Such a one is asked again from the beginning."""
COUNTS = ("max_new_tokens", "min_new_tokens")
OF_THE_PROMPT = ("prompt_tokens", "cached_tokens", "cached_tokens_details", "input_token_logprobs")
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def can_be_continued(asked: Mapping[str, Any]) -> bool:
    """Whether another server can continue what one has begun, so that nobody sees where it was cut."""
    ids, sampling = asked.get("input_ids"), asked.get("sampling_params") or {}
    if not (isinstance(ids, list) and ids and type(ids[0]) is int and isinstance(sampling, Mapping)):
        return False
    if any(type(sampling.get(key)) not in (int, NoneType) for key in COUNTS):
        return False  # a server says what is wrong with it
    if any(asked[key] for key in NOT_JOINED.intersection(asked)):
        return False
    return all(sampling[key] in DEPENDS_ON_ITS_OUTPUT[key] for key in DEPENDS_ON_ITS_OUTPUT.keys() & sampling.keys())


class PartialAnswer:
    """`request` is the body to send next; `take` gets each event; `answer` is there once `finish` is."""

    def __init__(self, asked: Mapping[str, Any], *, stream_interval: int) -> None:
        self._asked = asked
        self._interval = stream_interval
        self._sampling: Mapping[str, Any] = asked.get("sampling_params") or {}
        self._first: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._texts: list[str] = []
        self._logprobs: list[object] = []
        self._before = 0
        self.tokens: list[int] = []
        self.parts = 0

    @property
    def finish(self) -> dict[str, Any] | None:
        found = self._last.get("meta_info", {}).get("finish_reason")
        return found if isinstance(found, dict) else None

    @property
    def is_aborted(self) -> bool:
        return self.finish is not None and self.finish["type"] == "abort"

    def request(self) -> dict[str, Any]:
        """For the completion, or for what is missing of it. Begins another part. One that ends before anything of it
        would be sent is not streamed, which costs less."""
        self.parts += 1
        self._before = len(self.tokens)
        sampling = dict(self._sampling)
        streams = self._most is None or self._most - len(self.tokens) > self._interval
        if streams:
            sampling["stream_interval"] = -self._interval
        if not self.tokens:
            return {**self._asked, "sampling_params": sampling, "stream": streams}
        if self._most is not None:
            sampling["max_new_tokens"] = self._most - len(self.tokens)
        if sampling.get("min_new_tokens"):
            sampling["min_new_tokens"] = max(0, int(sampling["min_new_tokens"]) - len(self.tokens))
        own = {key: value for key, value in self._asked.items() if key not in ("rid", "logprob_start_len")}
        ids = [*self._asked["input_ids"], *self.tokens]
        return {**own, "input_ids": ids, "sampling_params": sampling, "stream": streams}

    @property
    def _most(self) -> int | None:
        most = self._sampling.get("max_new_tokens", USUAL_TOKENS)
        return None if most is None else int(most)

    def take_event(self, event: dict[str, Any], *, server: str) -> None:
        """The next tokens. Raises RequestFailed where they do not follow those before."""
        try:
            meta, ids = event["meta_info"], event.get("output_ids") or []
            logprobs = meta.get("output_token_logprobs") or []
            if meta["completion_tokens"] != len(self.tokens) - self._before + len(ids):
                raise malformed(server, f"{len(ids)} tokens that do not follow {len(self.tokens) - self._before}")
        except (KeyError, TypeError) as error:
            raise malformed(server, f"{error!r} in {str(event)[:200]}") from error
        if "output_token_logprobs" in meta and len(logprobs) != len(ids):
            raise malformed(server, f"log-probs of {len(logprobs)} tokens for {len(ids)}")
        self.tokens += ids
        self._logprobs += logprobs
        self._texts.append(event.get("text") or "")
        self._first = self._first or event
        self._last = event

    def cut(self) -> None:
        """The server is lost, or gave it up: what there is stays. All that was asked for may be there."""
        if self._most is not None and self.tokens and len(self.tokens) >= self._most:
            self._end({"type": "length", "length": self._most})
        else:
            self._end(None)

    def abort(self) -> None:
        """Its trainer asked for the end of what is being generated."""
        self._end(ABORTED)

    def _end(self, finish: dict[str, Any] | None) -> None:
        if self._last:  # else nothing of it has come
            self._last = {**self._last, "meta_info": {**self._last["meta_info"], "finish_reason": finish}}

    def answer(self) -> dict[str, Any]:
        """As the last server's own, of all tokens."""
        meta, first = dict(self._last["meta_info"]), self._first["meta_info"]
        if self.parts > 1:
            meta |= {key: first[key] for key in ("id", *OF_THE_PROMPT) if key in first}
            if (meta["finish_reason"] or {}).get("type") == "length":
                meta["finish_reason"] = {"type": "length", "length": len(self.tokens)}
        meta["completion_tokens"] = len(self.tokens)
        if "output_token_logprobs" in meta:
            meta["output_token_logprobs"] = self._logprobs
            meta["output_token_logprobs_length"] = len(self._logprobs)
        return {**self._last, "text": "".join(self._texts), "output_ids": self.tokens, "meta_info": meta}
