"""Each message of a library that ran out of memory, or met a fault of its GPU, is known, as a server's log has it.

The installed SGLang is searched for messages about memory that are not known: an upgrade may bring new ones.
"""

import ast
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from actors.serving.server_log_tail import decisive_lines
from actors.serving.sglang_cpu import sglang_folder
from launcher.base.messages import Cause
from launcher.policy.exit_cause import RanOut, find_server_cause, find_trainer_cause, least_fraction
from launcher.policy.memory_backoff import MEM_FRACTION, TriedSettings, next_rung
from tests.support.worlds.policy import CONFIG, GPU

MESSAGES = tomllib.loads((Path(__file__).parent / "data" / "exit_messages.toml").read_text())["message"]
SGLANG = sglang_folder() / "srt"
OF_MEMORY = re.compile(
    r"mem-fraction-static|out of memory|[Nn]ot enough \w* ?memory|[Ii]nsufficient \w* ?memory|no \w* ?memory for"
)
REVIEWED = {
    "Not enough host memory for request": "a request is refused, of a mode that is not used here",
    "for warmup, reducing max_m": "a note: less is warmed up",
    "is allocated from --mem-fraction-static headroom": "a note",
    "set --mem-fraction-static to a smaller value": "a hint beside any failed capture; the failure itself says more",
}
"""Messages that show by themselves no memory that ran out, and why."""


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["text"].splitlines()[0][:60])
def test_a_message_is_known_as_it_stands_in_a_log(message):
    log = f"[2026-11-22 10:00:00] Scheduler hit an exception: Traceback (most recent call last):\n{message['text']}\n"
    lines = decisive_lines(log)
    found = find_server_cause(lines, -9)
    expected = (message.get("cause", "server_oom"), message.get("ran_out"))
    assert (found.cause.value, found.ran_out and found.ran_out.value) == expected, lines
    assert least_fraction(" | ".join(lines)) == message.get("least_fraction", 0.0)
    if message.get("cause") == "gpu_fault":
        assert find_trainer_cause(lines, None).cause is Cause.GPU_FAULT
    elif message.get("ran_out") == "server_device":
        assert find_trainer_cause(lines, None).cause is Cause.TRAINER_OOM


def literals(file):
    """Texts of a module with their lines, docstrings left out; what is filled in is a 0."""
    tree = ast.parse(file.read_text(encoding="utf-8-sig"))
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    left_out |= {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (value.value if isinstance(value, ast.Constant) else "0" for value in node.values)
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.slow
def test_the_installed_sglang_says_nothing_about_memory_that_is_not_known():
    files = [file for file in SGLANG.rglob("*.py") if OF_MEMORY.search(file.read_text(errors="replace"))]
    found = [(file, line, text) for file in files for line, text in literals(file) if OF_MEMORY.search(text)]
    assert len(found) > 15, "SGLang has moved; the search finds nothing"
    unknown = [
        f"{file.relative_to(SGLANG)}:{line}: {text[:100]!r}"
        for file, line, text in found
        if find_server_cause(text.splitlines(), None).cause is not Cause.SERVER_OOM
        and not any(reviewed in text for reviewed in REVIEWED)
    ]
    assert unknown == [], "add a pattern to launcher/policy/exit_cause.py, or the text to REVIEWED"
    unused = [reviewed for reviewed in REVIEWED if not any(reviewed in text for _, _, text in found)]
    assert unused == []


def test_the_share_that_a_server_names_is_taken_at_once():
    """SGLang: "Raise --mem-fraction-static above 0.512"; 0.5 would fail the same way."""
    low = dataclasses.replace(GPU, mem_fraction_static=0.4)
    assert next_rung(RanOut.SERVER_POOL_TOO_SMALL, low, [], CONFIG).overrides == {MEM_FRACTION: 0.5}
    assert next_rung(RanOut.SERVER_POOL_TOO_SMALL, low, [], CONFIG, 0.512).overrides == {MEM_FRACTION: 0.6}
    assert next_rung(RanOut.SERVER_POOL_TOO_SMALL, low, [], CONFIG, 0.85).overrides == {}, "more than may be tried"


def test_a_share_that_was_named_is_not_given_below_the_one_at_which_an_allocation_failed():
    low = dataclasses.replace(GPU, mem_fraction_static=0.4)
    too_large = TriedSettings(ran_out=RanOut.TRAINER_DEVICE, settings=dataclasses.replace(GPU, mem_fraction_static=0.6))
    assert next_rung(RanOut.SERVER_POOL_TOO_SMALL, low, [too_large], CONFIG, 0.512).overrides == {}
