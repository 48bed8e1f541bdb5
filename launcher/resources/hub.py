"""Finds out which models and data sets of the Hugging Face hub are on this machine or can be had. Downloads nothing.

The cache is asked first; the hub itself only once, for its answer alone, with a deadline on all of it: a machine
without network must learn it in seconds, and name look-ups have no time limit of their own.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from launcher.config.data import data_ending

ANSWER_WITHIN_S = 5.0
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
    root = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    wanted = _letters(name.replace("/", "___"))
    return root.is_dir() and any(_letters(entry.name) == wanted and any(entry.iterdir()) for entry in root.iterdir())


@functools.cache
def why_unavailable(name: str, *, kind: str) -> str:
    """Why the hub won't give this `model` or `dataset`; empty where it would."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    api = HfApi()
    ask = api.model_info if kind == "model" else api.dataset_info
    return _within(lambda: ask(name, timeout=ANSWER_WITHIN_S), ANSWER_WITHIN_S)


def _within(ask: Callable[[], object], seconds: float) -> str:
    """Ask on a thread that is left behind if it doesn't return: a name look-up can't be cut short."""
    answers: list[str] = [f"the hub did not answer within {seconds:g} s"]

    def answer() -> None:
        try:
            ask()
            answers.append("")
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
