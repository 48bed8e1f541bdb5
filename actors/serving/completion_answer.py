"""SGLang's answer to /generate, as a Completion, or why it is none.

Everything that could make a failure look like a completion is checked here: it is the last place that can tell an
empty or damaged answer from a bad one, which would be scored 0 and trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from launcher.base.errors import RequestFailed
from launcher.base.rollouts import Completion

FINISHED = frozenset({"stop", "length"})


def malformed(server: str, what: str) -> RequestFailed:
    return RequestFailed(f"{server} answered 200 with something else: {what}", kind="malformed")


def _number(logprob: Any) -> float:
    """SGLang's JSON encoder writes null for what is not a number."""
    return math.nan if logprob is None else float(logprob)


def completion_from(answer: Mapping[str, Any], *, server: str) -> Completion:
    """Raises RequestFailed: aborted, empty, nonfinite or malformed."""
    try:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]["type"]
        token_ids = tuple(answer["output_ids"])
        if finish == "abort":
            said = meta["finish_reason"].get("message", "no reason given")
            raise RequestFailed(f"{server} aborted the request after {len(token_ids)} tokens: {said}", kind="aborted")
        if not token_ids:
            raise RequestFailed(f"{server} answered 200 with no tokens", kind="empty")
        logprobs = tuple(_number(entry[0]) for entry in meta["output_token_logprobs"])
        scored_ids = tuple(entry[1] for entry in meta["output_token_logprobs"])
        weight_version = int(meta["weight_version"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise malformed(server, f"{error!r} in {str(answer)[:200]}") from error
    if finish not in FINISHED:
        raise malformed(server, f"finish_reason {finish!r}")
    if scored_ids != token_ids or not all(type(token) is int for token in token_ids):
        raise malformed(server, f"log-probs of {len(scored_ids)} tokens for {len(token_ids)}, or of other ones")
    if not all(map(math.isfinite, logprobs)):
        raise RequestFailed(f"{server} answered with log-probs that are not finite", kind="nonfinite")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        weight_version=weight_version,
        finish_reason=finish,
        server=server,
    )
