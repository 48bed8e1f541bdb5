"""The table of event names against the code that records them, and against docs/files.md."""

import ast
import re

import pytest

from actors.supervision.run_history import EVENTS
from launcher.base.messages import Cause, Health
from launcher.config.compose import REPOSITORY
from launcher.policy.observed import RunState
from launcher.run_files.event_names import EVENT_NAMES

RECORDERS = {"record", "_record", "event", "_event", "told", "_told", "tell", "_tell"}
"""The journal's method, and callables that are handed on in its place."""
NAME = re.compile(r"[a-z]+\.[a-z_]+")


def recorded():
    """Each literal event name that is recorded, with its file."""
    for folder in ("launcher", "actors", "scripts"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for name in recorded_in(path.read_text()):
                yield name, path.relative_to(REPOSITORY)


def recorded_in(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in RECORDERS:
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            yield from (word for word in words if isinstance(word, str) and NAME.fullmatch(word))


def test_an_event_is_found_whichever_callable_records_it():
    source = """
journal.record("a.record", subject="x")
self._event("a.event", name, reason)
told("a.told", name, reason)
self._told("a.told_too", name, reason)
self._tell(is_on, "a.tell", "a.tell_over", reason)
log("no.event")
"""
    assert [*recorded_in(source)] == ["a.record", "a.event", "a.told", "a.told_too", "a.tell", "a.tell_over"]


@pytest.mark.slow
def test_every_recorded_event_has_a_meaning():
    found = list(recorded())
    assert len(found) > 40, "the search finds what is recorded"
    assert [(name, str(path)) for name, path in found if name not in EVENT_NAMES] == []


@pytest.mark.parametrize("name", [name for pair in EVENTS.values() for name in pair])
def test_every_action_has_both_names(name):
    assert name in EVENT_NAMES


def test_names_that_are_made_of_states():
    assert {f"run.{state.lower()}" for state in RunState} <= set(EVENT_NAMES)
    assert {f"health.{health.lower()}" for health in Health} <= set(EVENT_NAMES)
    assert {f"health.{cause}" for cause in (Cause.NONFINITE, Cause.REWARD_COLLAPSE, Cause.VERIFIER_BROKEN)} <= set(
        EVENT_NAMES
    )


def test_the_page_has_the_same_table():
    page = (REPOSITORY / "docs" / "files.md").read_text()
    table = page.partition("<!-- events -->\n")[2].partition("<!-- end of events -->")[0]
    rows = [f"| `{name}` | {meaning} |" for name, meaning in EVENT_NAMES.items()]
    assert table.splitlines() == ["| event | meaning |", "|---|---|", *rows]
