"""The command of a run, and its driver where no person is before it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import TextIO

KEEPER = "keeper"
"""The name of the actor that a detached run's driver is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattended:
    """A driver without a person before it: what it says goes to `out`. `command`: by which the person started it.

    `is_again`: an earlier one of the same command was lost; what a person has asked since still holds.
    """

    out: TextIO
    command: str
    is_again: bool


def same_command(unattended: Unattended | None = None) -> str:
    """The command of this run, to be typed again: it resumes."""
    if unattended is not None:
        return unattended.command
    return " ".join(["python -m launcher", *map(shlex.quote, sys.argv[1:])])
