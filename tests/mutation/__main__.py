"""Which small changes of a module no test notices: `python -m tests.mutation launcher/policy/routing.py …`.

Each change is tried in a fork of one process that has imported everything: the function gets its changed code, and
the tests that pass its line run, the quickest first, until one fails. mutmut 3.8 and cosmic-ray 8.7 do not remove an
operand or a statement (`queue.commit`, the journal's fsync), and mutmut leaves out every decorated function.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.mutations import Mutant, mutants
from tests.mutation.targets import TARGETS
from tests.mutation.verdicts import DOUBTED, LIVES, PAGE, Outcome, page, read, without_reason, write

QUIET = ["-s", "-p", "no:cacheprovider", "-p", "no:terminal", "-o", "timeout=0"]
SLOWER, PATIENCE_S = 4, 10.0
"""A change that loops for ever is noticed too: a test takes so many times longer than without it, and so much."""
Passed = Mapping[str, tuple[float, set[int]]]
"""Of each test: how long it takes, and which lines of the module it passes."""


def run_tests(
    items: Sequence[pytest.Item],
    each: Callable[[str, float], None] | None = None,
    limit_s: Callable[[str], float] = lambda name: 900.0,
) -> bool:
    """Until the first that fails. `each` is told how long each took. The process ends where one takes too long."""
    for item, after in zip(items, [*items[1:], None], strict=True):
        started = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, limit_s(item.nodeid))
        if any(report.failed for report in runtestprotocol(item, nextitem=after, log=False)):
            return False
        if each is not None:
            each(item.nodeid, time.monotonic() - started)
    return True


def passed_lines(path: str, items: Sequence[pytest.Item]) -> Passed:
    """Found by a tracer, in a fork. Exits where a test fails without any change."""
    with tempfile.NamedTemporaryFile("r") as found:

        def work() -> bool:
            lines: set[int] = set()
            passed: dict[str, tuple[float, list[int]]] = {}

            def within(frame: types.FrameType, event: str, _: object) -> Callable[..., object]:
                lines.add(frame.f_lineno)
                return within

            def enters(frame: types.FrameType, event: str, _: object) -> Callable[..., object] | None:
                return within(frame, event, None) if frame.f_code.co_filename == path else None

            def each(name: str, seconds: float) -> None:
                passed[name] = seconds, sorted(lines)
                lines.clear()

            threading.settrace(enters)
            sys.settrace(enters)
            is_green = run_tests(items, each)
            sys.settrace(None)
            Path(found.name).write_text(json.dumps(passed))
            return is_green

        if in_fork(work) is not True:
            done = json.loads(found.read() or "{}")
            sys.exit(f"not green as they are, after {[*done][-1:]}")
        return {name: (seconds, set(lines)) for name, (seconds, lines) in json.loads(found.read()).items()}


def in_fork(work: Callable[[], bool]) -> bool | None:
    """What `work` answers, done in a fork that has a process group of its own; None where a test took too long."""
    child = os.fork()
    if child == 0:
        os.setsid()
        is_green = False
        try:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            is_green = work()
        finally:
            os._exit(0 if is_green else 1)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # servers that its tests have left
    ended = os.waitstatus_to_exitcode(status)
    return None if ended == -signal.SIGALRM else ended == 0


def put_in(module: types.ModuleType, mutant: Mutant) -> None:
    """The function keeps its identity and gets the changed code, whoever has imported it; a constant is set anew."""
    found: object = module
    for part in mutant.scope.split("."):
        found = vars(found)[part]
    for inner in ("__func__", "fget", "func", "__wrapped__"):
        found = getattr(found, inner, found)
    if isinstance(found, types.FunctionType):
        found.__code__ = _code_of(mutant)
        return
    changed = {"__name__": module.__name__}
    exec(mutant.code, changed)
    for other in list(sys.modules.values()):
        if getattr(other, mutant.scope, None) is found:
            setattr(other, mutant.scope, changed[mutant.scope])


def _code_of(mutant: Mutant) -> types.CodeType:
    code = mutant.code
    for part in mutant.scope.split("."):
        named = [one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == part]
        code = next((one for one in named if one.co_firstlineno == mutant.first_line), named[0])
    return code


def outcome(module: types.ModuleType, mutant: Mutant, items: Sequence[pytest.Item], passed: Passed) -> Outcome:
    chosen = [one for one in items if mutant.scope.isupper() or mutant.lines & passed[one.nodeid][1]]
    if not chosen:
        return Outcome.UNTESTED
    chosen.sort(key=lambda item: passed[item.nodeid][0])

    def work() -> bool:
        put_in(module, mutant)
        return run_tests(chosen, limit_s=lambda name: PATIENCE_S + SLOWER * passed[name][0])

    is_green = in_fork(work)
    return Outcome.SURVIVED if is_green else Outcome.TIMED_OUT if is_green is None else Outcome.KILLED


@dataclass
class InPlaceOfTests:
    """A pytest plugin: once the tests are collected, and so all is imported, the mutants are tried instead."""

    path: str
    only: str
    before: Mapping[str, Outcome] = field(default_factory=dict)
    found: dict[str, Outcome] = field(default_factory=dict)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        module = importlib.import_module(self.path.removesuffix(".py").replace("/", "."))
        assert module.__file__ is not None
        passed = passed_lines(module.__file__, session.items)
        for mutant in mutants(Path(self.path).read_text(), module.__file__):
            if self.only in mutant.name:
                was = self.before.get(mutant.name, Outcome.SURVIVED)
                if was in DOUBTED:
                    was = outcome(module, mutant, session.items, passed)
                self.found[mutant.name] = was
                if was in DOUBTED:
                    print(f"{self.path}:{min(mutant.lines)}: {was}: {mutant.name}", flush=True)
        return True


def judge(path: str, results: Path, only: str, *, again: bool) -> int:
    trial = InPlaceOfTests(path, only, read(path, results) or {} if again else {})
    code = pytest.main([*QUIET, *TARGETS[path]], plugins=[trial])
    if code == 0 and trial.found:
        became = Counter(trial.found.values())
        lives, late = sum(became[was] for was in LIVES), became[Outcome.TIMED_OUT]
        print(f"{path}: {len(trial.found)} mutants, {lives} survived, {late} timed out", flush=True)
        if not only:
            write(path, results, trial.found)
    return int(code)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("files", nargs="*", choices=[[], *TARGETS], metavar="FILE", help="of tests/mutation/targets.py")
    parser.add_argument("--only", default="", help="mutants whose name contains this; nothing is written then")
    parser.add_argument("--results", type=Path, default=Path("mutation-results"), help="a folder (%(default)s)")
    parser.add_argument("--again", action="store_true", help="only those that are new, lived or timed out")
    parser.add_argument("--page", action="store_true", help="write tests/mutation/README.md from the results")
    given = parser.parse_args()
    for path in given.files:
        child = os.fork()  # so that one module's imports are not the next one's
        if child == 0:
            os._exit(judge(path, given.results, given.only, again=given.again))
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            return 1
    if given.page:
        PAGE.write_text(page(given.results, PAGE.read_text()))
    unlisted = [] if given.only else [line for path in given.files for line in without_reason(path, given.results)]
    print("\n".join(unlisted))
    return 1 if unlisted else 0


if __name__ == "__main__":
    sys.exit(main())
