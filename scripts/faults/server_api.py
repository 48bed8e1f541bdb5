"""Faults through a server's own API: stale and damaged weights, and requests that it has no memory for."""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launcher.base.durable import make_folder
from launcher.checkpoints.in_memory_checkpoints import memory_folder
from launcher.checkpoints.tensor_files import read_entries
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths
from scripts.faults.signals import Missed

TIMEOUT_S = 60.0
SIGN_BYTE = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of a number; the last of them, little-endian, begins with the sign."""


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


def damaged_weights(paths: RunPaths, to: Path, draw: Callable[[int], int]) -> str:
    """Copy the newest published weights and turn all signs of one tensor; which one. Raises Missed.

    `draw(n)` picks one of n.
    """
    published = memory_folder(paths, "weights")
    versions = [folder for folder in published.glob("v*") if folder.is_dir()]
    if not versions:
        raise Missed(f"no published weights in {published}", "C6 needs actor.weight_update_mode=disk and one step")
    newest = max(versions, key=lambda folder: int(folder.name[1:]))
    shutil.rmtree(to, ignore_errors=True)
    make_folder(to.parent)
    try:
        shutil.copytree(newest, to)
    except (OSError, shutil.Error) as error:
        raise Missed(f"{newest} was removed while it was copied", "try again") from error
    file = max(to.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    return f"{turn_signs(file, draw)} of {newest.name}"


def turn_signs(file: Path, draw: Callable[[int], int]) -> str:
    """Turn the signs of one matrix in a safetensors file, in place; its name."""
    matrices = [one for one in read_entries(file).values() if one.dtype in SIGN_BYTE and len(one.shape) > 1]
    chosen = sorted(matrices, key=lambda one: one.name)[draw(len(matrices))]
    size = SIGN_BYTE[chosen.dtype]
    with file.open("r+b") as opened:
        opened.seek(chosen.begin)
        data = bytearray(opened.read(chosen.end - chosen.begin))
        data[size - 1 :: size] = bytes(byte ^ 0x80 for byte in data[size - 1 :: size])
        opened.seek(chosen.begin)
        opened.write(data)
    return chosen.name


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
