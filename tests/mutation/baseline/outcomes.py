"""What became of a mutant, as one line of text: the test that killed it, or why none did."""

from __future__ import annotations

SURVIVED = "survived"
NOT_ALL_RUN = "survived, but not every test that passes its line was run"
UNTESTED = "no test passes its line"
NOT_TRIED = "not tried: the changed code can't be put in its place"
LATE = "stopped after a test's time: "
"""Before the test's name: a change that loops for ever is noticed too."""
Outcomes = dict[str, str]


def killer_of(outcome: str) -> str:
    """The test's name; "" where no test noticed."""
    name = outcome.removeprefix(LATE)
    return name if name.startswith("tests/") else ""


def names_a_test(outcome: str) -> bool:
    return killer_of(outcome) != ""
