"""The command that started a run, and how its driver works without a terminal."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import TextIO

DRIVER_ACTOR = "driver"
"""The name of the actor that a detached run's driver is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattended:
    """A driver without a terminal: its output goes to `out`. `command` is the one that the user gave.

    `is_again`: an earlier driver of the same command was lost; requests made since are still valid.
    """

    out: TextIO
    command: str
    is_again: bool


def same_command(unattended: Unattended | None = None) -> str:
    """The command of this run, to be typed again: it resumes."""
    if unattended is not None:
        return unattended.command
    return " ".join(["python -m launcher", *map(shlex.quote, sys.argv[1:])])
