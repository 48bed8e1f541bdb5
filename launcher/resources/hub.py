"""Finds out which models and data sets of the Hugging Face hub are on this machine or can be had. Downloads nothing.

The cache is asked first; the hub itself only once, for its answer alone, with a deadline on all of it: a machine
without network must learn it in seconds, and name look-ups have no time limit of their own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub import HfApi, ModelInfo, constants
from huggingface_hub.errors import HfHubHTTPError

from launcher.config.data import data_ending
from launcher.resources.memory_estimate import GIB
from launcher.resources.missing_machine import nearest_existing, why_not_writable

ANSWER_WITHIN_S = 5.0
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""As huggingface_hub asks for them, before its own file."""
HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def is_hub_name(text: str) -> bool:
    """`Qwen/Qwen2.5-1.5B-Instruct` is; `./model`, `/model`, `a/b/c` and `data.jsonl` are paths."""
    return HUB_NAME.fullmatch(text) is not None and not data_ending(text)


def cached_model(name: str) -> Path | None:
    """The folder of a model in the local cache, complete or not; None where nothing of it is there."""
    config = huggingface_hub.try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def is_cached_dataset(name: str) -> bool:
    """Whether `datasets` has prepared it here before: `openai/gsm8k` lies in `openai___gsm8k`."""
    root, wanted = cache_of("dataset"), _letters(name.replace("/", "___"))
    try:
        return any(_letters(entry.name) == wanted and any(entry.iterdir()) for entry in root.iterdir())
    except OSError:  # none is there, or `why_not_kept` tells
        return False


def cache_of(kind: str) -> Path:
    """The folder in which a `model` or a `dataset` is kept."""
    if kind == "model":
        return Path(constants.HF_HUB_CACHE)
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")


def why_not_kept(kind: str) -> str:
    """Why the cache can't be read or take a file; empty where it can."""
    folder = cache_of(kind)
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            next(folder.iterdir(), None)
        refusal = why_not_writable(nearest_existing(folder))
    except OSError as error:
        refusal = error.strerror or str(error)
    return f"its cache {folder} can't be used: {refusal}" if refusal else ""


@functools.cache
def why_unavailable(name: str, *, kind: str) -> str:
    """Why the hub won't give this `model` or `dataset`, or it has no place here; empty where it would."""
    if refusal := why_not_kept(kind):
        return refusal
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if refusal := why_no_token():
        return refusal
    api = HfApi()
    if kind == "dataset":
        return _within(lambda: api.dataset_info(name, timeout=ANSWER_WITHIN_S), ANSWER_WITHIN_S)
    return _within(
        lambda: _check_room(api.model_info(name, timeout=ANSWER_WITHIN_S, files_metadata=True), name), ANSWER_WITHIN_S
    )


def why_no_token() -> str:
    """Why the token can't be sent, without showing it; "" where it can, or there is none. In a header of HTTP it must
    be ASCII, and what sends it names only its codec."""
    token = huggingface_hub.get_token() or ""
    if token.isascii():
        return ""
    whose = next((name for name in TOKENS if os.environ.get(name)), str(constants.HF_TOKEN_PATH))
    at = next(number for number, letter in enumerate(token, 1) if not letter.isascii())
    return f"{whose} is no token: its character {at} is not ASCII; copy the token again, or unset it"


class _NoRoom(Exception):
    """The message says how much there is."""


def _check_room(model: ModelInfo, name: str) -> None:
    """Raises _NoRoom. What is there already of it, as after a download that broke off, needs none."""
    parts = {file.rfilename: file.size or 0 for file in model.siblings or () if file.rfilename.endswith(".safetensors")}
    here = cached_model(name)
    needed = sum(size for part, size in parts.items() if here is None or not (here / part).is_file())
    folder = cache_of("model")
    free = shutil.disk_usage(nearest_existing(folder)).free
    if free < needed:
        raise _NoRoom(f"its cache {folder} has {free / GIB:.1f} GiB free of the {needed / GIB:.1f} GiB that it takes")


def _within(ask: Callable[[], object], seconds: float) -> str:
    """Ask on a thread that is left behind if it doesn't return: a name look-up can't be cut short."""
    answers: list[str] = [f"the hub did not answer within {seconds:g} s"]

    def answer() -> None:
        try:
            ask()
            answers.append("")
        except _NoRoom as error:
            answers.append(str(error))
        except HfHubHTTPError as error:
            answers.append(f"the hub refuses: {str(error).splitlines()[0]}")
        except httpx.TimeoutException:
            answers.append(answers[0])
        except (httpx.HTTPError, OSError, ValueError) as error:
            answers.append(f"the hub can't be reached ({error})")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[-1]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
