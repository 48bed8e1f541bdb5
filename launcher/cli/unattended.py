"""The command that started a run, and how its driver works without a terminal."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import TextIO

from launcher.base.own_python import python
from launcher.config.schema import RunConfig
from launcher.run_files.run_keys import keep_webhook, read_webhook, shown_webhook
from launcher.run_files.run_paths import RunPaths

DRIVER_ACTOR = "driver"
"""The name of the actor that a detached run's driver is."""
WEBHOOK = ("alerts.webhook", "+alerts.webhook", "++alerts.webhook")
QUOTES = "'\""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattended:
    """A driver without a terminal: its output goes to `out`. `command` is the one that the user gave.

    `is_again`: an earlier driver of the same command was lost; requests made since are still valid.
    """

    out: TextIO
    command: str
    is_again: bool


def hide_webhook(config: RunConfig, paths: RunPaths) -> None:
    """Keep the URL of the alerts with the run's keys. From here on nothing else of this process has it.

    Raises UsageError, StorageError.
    """
    if (given := config.alerts.webhook) is not None:
        config.alerts.webhook = shown = keep_webhook(given, paths.keys)
        url = read_webhook(paths.keys)  # in the settings of an earlier attempt, `given` is what is shown of it
        sys.argv[:] = [_without(word, url, shown) for word in sys.argv]


def _without(word: str, url: str, shown: str) -> str:
    """The URL may be a setting's value, or in one: `alerts={webhook: …}`."""
    key, equals, value = word.partition("=")
    return f"{key}{equals}{shown_webhook(value.strip(QUOTES))}" if key in WEBHOOK else word.replace(url, shown)


def typed_command(unattended: Unattended | None) -> str:
    """The same for a shell in which `python` may be another interpreter."""
    return python() + same_command(unattended).removeprefix("python")


def same_command(unattended: Unattended | None = None) -> str:
    """The command of this run, to be typed again: it resumes."""
    if unattended is not None:
        return unattended.command
    return " ".join(["python -m launcher", *map(shlex.quote, sys.argv[1:])])
