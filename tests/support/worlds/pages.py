"""The repository, and the tests that a file has."""

import ast
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


@cache
def functions_of(path):
    tree = ast.parse((REPOSITORY / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
