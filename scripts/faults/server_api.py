"""Faults through a server's own API: stale weights, and requests that it has no memory for."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launcher.run_files.run_keys import ServerKeys
from scripts.faults.signals import Missed

TIMEOUT_S = 60.0


def ask(
    url: str, path: str, keys: ServerKeys, body: dict[str, Any] | None = None, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """One call, with the run's admin key, which opens everything. Raises Missed with what the server said."""
    said = _ask(url, path, keys, body, timeout_s)
    try:
        return dict(json.loads(said))
    except ValueError as error:
        raise Missed(f"{url}{path}: {error}", "see its log") from error


def _ask(url: str, path: str, keys: ServerKeys, body: dict[str, Any] | None, timeout_s: float) -> bytes:
    request = urllib.request.Request(
        url + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {keys.admin}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except OSError as error:  # URLError and HTTPError too
        raise Missed(f"{url}{path}: {error}", "401: its run has other keys by now") from error


def weight_version(url: str, keys: ServerKeys) -> str:
    """As the server says it. Raises Missed."""
    return str(ask(url, "/model_info", keys).get("weight_version"))


def load_weights(url: str, folder: str, keys: ServerKeys, *, version: str) -> None:
    """What runs is aborted, so that it is asked again and comes from these weights. Raises Missed.

    The cache is flushed by a request of its own: within the update SGLang dies of it while a request is running.
    """
    body = {"model_path": folder, "weight_version": version, "abort_all_requests": True, "flush_cache": False}
    if not ask(url, "/update_weights_from_disk", keys, body).get("success"):
        raise Missed(f"{url} refused the weights in {folder}", "see its log")
    _ask(url, f"/flush_cache?timeout={TIMEOUT_S:g}", keys, {}, TIMEOUT_S)


def keep_busy(
    url: str, keys: ServerKeys, *, tokens: int, together: int, prompt: int, until: float, alive: Callable[[], bool]
) -> int:
    """Send generations of a stranger, `together` at a time, until the monotonic time or until it dies; how many."""
    body = {
        "input_ids": [1] * prompt,
        "sampling_params": {"max_new_tokens": tokens, "min_new_tokens": tokens, "temperature": 1.0},
        "return_logprob": True,
    }

    def one(_: int) -> int:
        sent = 0
        while time.monotonic() < until and alive():
            sent += 1
            try:
                ask(url, "/generate", keys, body, timeout_s=max(until - time.monotonic(), 1.0))
            except Missed:
                time.sleep(0.1)  # it is dying, which is what was wanted, or full
        return sent

    with ThreadPoolExecutor(together) as pool:
        return sum(pool.map(one, range(together)))
