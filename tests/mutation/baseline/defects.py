"""The defects that are named by tests: what went wrong before, or must hold, is the docstring of a test, or what a
scenario of the simulated run stands for.

A test may move, be renamed, or become a row of a table: the sentence is looked for, in any text of the tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def named_defects(tests: Path = Path("tests")) -> dict[str, str]:
    """By file::test, of every test function that has a docstring, and by file::scenario; in one line each."""
    found = {}
    for path in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, FUNCTION) and node.name.startswith("test") and (text := ast.get_docstring(node)):
                found[f"{path.relative_to(tests.parent)}::{node.name}"] = _in_one_line(text)
            elif isinstance(node, ast.Call):
                named = {keyword.arg: keyword.value for keyword in node.keywords}
                match named.get("befalls"), named.get("stands_for"):
                    case ast.Name(name), ast.Constant(str(text)):
                        found[f"{path.relative_to(tests.parent)}::{name}"] = _in_one_line(text)
    return found


def no_longer_there(before: Mapping[str, str], tests: Path = Path("tests")) -> list[str]:
    """The tests whose sentence stands nowhere any more."""
    texts = "\n".join(_texts(tests))
    return [name for name, sentence in before.items() if sentence not in texts]


def _texts(tests: Path) -> Iterator[str]:
    for path in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield _in_one_line(node.value)


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
