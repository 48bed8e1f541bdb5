"""The small changes that a test should notice: one comparison, operand, number or statement of a module at a time.

Text is left as it is (messages, docstrings, log lines), and so are annotations, asserts and the defaults of a class.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType

COMPARED = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_RUN = ("annotation", "returns", "decorator_list", "args")
"""Fields of a function that are worked out when its module is imported."""
Place = tuple[ast.AST, str, int | None]
"""A node's parent, the field that holds it, and its index where that is a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`scope`: the outermost function that holds the change, dotted with its class; for a constant its name alone.
    `lines`: of the change, and the first of its statement; `first_line`: of that function, decorators included.
    `code`: of the complete module."""

    scope: str
    lines: frozenset[int]
    first_line: int
    change: str
    code: CodeType

    @property
    def name(self) -> str:
        return f"{self.scope}: {self.change}"


def mutants(source: str, path: str, wanted: Container[str] | None = None) -> Iterator[Mutant]:
    """Each names its change in full, so that it is found again where lines have moved; equal ones are numbered.

    `wanted`: only those with these names, None: all."""
    for build, name in _named(ast.parse(source), path):
        if wanted is None or name in wanted:
            yield build()


def names_of(source: str) -> list[str]:
    """Of all mutants, none of which is compiled: that takes a second for each hundred."""
    return [name for _, name in _named(ast.parse(source), "")]


def _named(tree: ast.Module, path: str) -> Iterator[tuple[Callable[[], Mutant], str]]:
    """The tree holds the change until the next one is asked for."""
    seen: dict[str, int] = {}
    for scope, top in _scopes(tree):
        first_line = min([top.lineno, *(d.lineno for d in getattr(top, "decorator_list", []))])
        for node, (parent, field, index), lines in _nodes(top, {top.lineno}):
            for changed in _changes(node, parent):
                change = f"{_shown(node)} → {_shown(changed)}"
                number = seen[f"{scope}: {change}"] = seen.get(f"{scope}: {change}", 0) + 1
                named = change if number == 1 else f"{change} ({number})"
                _put(parent, field, index, ast.copy_location(changed, node))
                yield partial(_mutant, tree, path, scope, frozenset(lines), first_line, named), f"{scope}: {named}"
                _put(parent, field, index, node)


def _mutant(tree: ast.Module, path: str, scope: str, lines: frozenset[int], first_line: int, change: str) -> Mutant:
    code = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
    return Mutant(scope=scope, lines=lines, first_line=first_line, change=change, code=code)


def _scopes(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for statement in tree.body:
        if isinstance(statement, FUNCTION):
            yield statement.name, statement
        elif isinstance(statement, ast.ClassDef):
            yield from ((f"{statement.name}.{one.name}", one) for one in statement.body if isinstance(one, FUNCTION))
        elif isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]).isupper():
            yield ast.unparse(statement.targets[0]), statement


def _nodes(top: ast.AST, statement: set[int]) -> Iterator[tuple[ast.AST, Place, set[int]]]:
    for field, value in ast.iter_fields(top):
        if field in NOT_RUN and not isinstance(top, ast.Call | ast.Lambda):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Assert) or _is_logged(child):
                continue
            own = {child.lineno} if isinstance(child, ast.stmt) else statement
            end = getattr(child, "end_lineno", 0)
            yield child, (top, field, index), own | {*range(getattr(child, "lineno", 1), end + 1)}
            yield from _nodes(child, own)


def _is_logged(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(("log.", "assert_never("))


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _changes(node: ast.AST, parent: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, ops, comparators):
            for at, op in enumerate(ops):
                for other in COMPARED[type(op)]:
                    yield ast.Compare(left, [*ops[:at], other(), *ops[at + 1 :]], comparators)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            for at in range(len(values)):
                rest = values[:at] + values[at + 1 :]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.UnaryOp(ast.USub(), ast.Constant(int())) if isinstance(parent, ast.Subscript):
            yield ast.Constant(0)
        case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.BinOp(left, op, right) if type(op) in COMPUTED and not _is_text(left) and not _is_text(right):
            yield ast.BinOp(left, COMPUTED[type(op)](), right)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(-1 if isinstance(parent, ast.Subscript) and value == 0 else value + 1)
        case ast.Call(ast.Name(name), arguments, keywords) if name in CALLED:
            yield ast.Call(ast.Name(CALLED[name], ast.Load()), arguments, keywords)
        case ast.Expr(ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield ast.Pass()
        case ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.comprehension(ifs=conditions):
            for at in range(len(conditions)):
                fewer = copy.copy(node)
                fewer.ifs = conditions[:at] + conditions[at + 1 :]
                yield fewer
    if _is_condition(node, parent):
        yield ast.UnaryOp(ast.Not(), node)


def _is_condition(node: ast.AST, parent: ast.AST) -> bool:
    """A plain name, attribute or call that decides; comparisons are negated by themselves."""
    decides = isinstance(parent, ast.If | ast.While | ast.IfExp) and parent.test is node
    return decides and isinstance(node, ast.Name | ast.Attribute | ast.Call)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _shown(node: ast.AST) -> str:
    return "(removed)" if isinstance(node, ast.Pass) else " ".join(ast.unparse(node).split())
