"""Tries the fixed mutants of module after module in forks of one process that has imported every quick unit test.

Which tests run: those that passed the changed line when the coverage was measured; first what has killed before, then
those of the module's own test file, then of its room, each the quickest first, until one fails or the time is used up.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import coverage
import hypothesis
import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.__main__ import put_in
from tests.mutation.baseline.outcomes import (
    LATE,
    NOT_ALL_RUN,
    NOT_TRIED,
    SURVIVED,
    UNTESTED,
    Outcomes,
    killer_of,
    names_a_test,
)
from tests.mutation.mutations import Mutant, mutants, names_of

NOT_UNIT = ("ray", "e2e", "chaos", "runs", "mutation")
"""Folders of tests that start Ray and SGLang, or test the tests; all others of tests/ may notice a mutant."""
IMPORTED_BEFORE = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is, here: else nothing is collected
OPTIONS = ["-n", "0", "-p", "no:cacheprovider", "-o", "timeout=0", "-m", "not slow and not long", *IMPORTED_BEFORE]
DRAWN = 40
A_TEST_S = 0.01  # what pytest itself needs for a test, beside the test's own time
SLOWER, PATIENCE_S = 4, 3.0
"""A change may loop for ever: a test has so many times its usual time of the processor, and so much."""
WAITS_S = 20.0  # by the clock: a change may make a test wait for ever, which takes no time of the processor
KILLED, NO_PLACE = 1, 2  # exit codes of a fork


def folders_of_tests(tests: Path = Path("tests")) -> list[str]:
    folders = (folder for folder in tests.iterdir() if folder.is_dir() and folder.name not in NOT_UNIT)
    return sorted(str(folder) for folder in folders if any(folder.rglob("test_*.py")))


def drawn(path: str, source: str) -> list[str]:
    """Always the same ones of the same source."""
    names = names_of(source)
    return names if len(names) <= DRAWN else random.Random(path).sample(names, DRAWN)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the coverage run found: which tests pass each line of a module, and how long each test takes."""

    data: coverage.CoverageData
    durations: Mapping[str, float]

    def tests_by_line(self, path: str) -> dict[int, set[str]]:
        by_line = self.data.contexts_by_lineno(str(Path(path).resolve()))
        return {line: {name for name in names if name in self.durations} for line, names in by_line.items()}


@dataclass
class Trials:
    """A pytest plugin: once the tests are collected, and so all is imported, the mutants are tried instead."""

    seen: Seen
    wanted: Sequence[tuple[str, Mapping[str, str]]]
    """Modules, and the mutants to try of each with what became of it before; in this order."""
    done: Callable[[str, Outcomes], None]
    ends_at: float
    most_s: float
    """Of tests for one mutant: else those that live, on lines that a thousand tests pass, take the time of all."""
    folder: Path
    """For the forks, one after the other."""
    _items: dict[str, pytest.Item] = field(default_factory=dict)
    _sound: dict[str, bool] = field(default_factory=dict)
    _by_line: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    _killers: dict[str, list[str]] = field(default_factory=dict)

    def pytest_configure(self) -> None:
        """The same examples for each mutant, and none remembered from the one before."""
        same = hypothesis.settings(hypothesis.settings.get_profile("shared machine"), derandomize=True, database=None)
        hypothesis.settings.register_profile("the same for each mutant", same)
        hypothesis.settings.load_profile("the same for each mutant")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        gc.collect()
        gc.freeze()  # a collection in a fork would copy every page of the parent
        for path, before in self.wanted:
            if time.monotonic() > self.ends_at:
                print("the time is over", flush=True)
                break
            began = time.monotonic()
            outcomes = self.module(path, before)
            self.done(path, outcomes)
            lives = sum(not names_a_test(was) for was in outcomes.values())
            print(f"{path}: {lives} of {len(outcomes)} live, {time.monotonic() - began:.0f} s", flush=True)
        return True

    def module(self, path: str, before: Mapping[str, str]) -> Outcomes:
        source = Path(path).read_text()
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        if path not in self._by_line:
            self._by_line[path] = self.seen.tests_by_line(path)
        by_line = self._by_line[path]
        outcomes: Outcomes = {}
        killers = self._killers.setdefault(path, [])
        for mutant in mutants(source, str(Path(path).resolve()), before):
            killed_before = killer_of(before[mutant.name])
            lines = by_line if mutant.scope.isupper() else mutant.lines
            passing = {name for line in lines for name in by_line.get(line, ()) if name in self._items}
            if killed_before in self._items:
                passing.add(killed_before)
            first = [name for name in (killed_before, *reversed(killers)) if name in passing]
            was = self.outcome(module, mutant, self._in_order(path, passing, first))
            outcomes[mutant.name] = was
            if killer := killer_of(was):
                killers[:] = [*(one for one in killers if one != killer), killer]
        return outcomes

    def _in_order(self, path: str, names: Iterable[str], first: Sequence[str]) -> list[str]:
        room, _, file = path.rpartition("/")
        own, near = f"/{room}/test_{file}::", f"/{room}/"

        variants: Counter[str] = Counter()
        variant: dict[str, int] = {}
        for name in sorted(names, key=lambda name: (self.seen.durations.get(name, 0.0), name)):
            function = name.partition("[")[0]
            variant[name] = variants[function]
            variants[function] += 1

        def weight(name: str) -> tuple[int, int, int, float, str]:
            place = first.index(name) if name in first else len(first)
            distance = 0 if own in name else 1 if near in name else 2
            # one case of each table before the others of any: they are much alike. Tests of one file that are about
            # equally quick stay together: they share what the file has made
            return place, distance, variant[name], round(self.seen.durations.get(name, 0.0), 1), name

        return sorted(names, key=weight)

    def outcome(self, module: object, mutant: Mutant, names: list[str]) -> str:
        """`names`: the tests that pass its line, in the order in which they are run."""
        names = [name for name in names if self._sound.get(name, True)]
        if not names:
            return UNTESTED
        chosen, left_s = [], self.most_s
        for name in names:
            if left_s <= 0:
                break
            chosen.append(name)
            left_s -= self.seen.durations.get(name, 0.0) + A_TEST_S
        code, last = self._in_fork(chosen, lambda: put_in(module, mutant))  # type: ignore[arg-type]
        if code == NO_PLACE or not last:  # no test began: the change could not be put in
            return NOT_TRIED
        if code == 0:
            return SURVIVED if len(chosen) == len(names) else NOT_ALL_RUN
        if code in (-signal.SIGALRM, -signal.SIGPROF):
            return f"{LATE}{last}"
        if self._is_sound(last):
            return last
        return self.outcome(module, mutant, names)

    def _is_sound(self, name: str) -> bool:
        """Whether it passes alone and without any change; one that does not kills nothing."""
        if name not in self._sound:
            self._sound[name] = self._in_fork([name], lambda: None)[0] == 0
            if not self._sound[name]:
                print(f"fails without a change: {name}", flush=True)
        return self._sound[name]

    def _in_fork(self, names: list[str], prepare: Callable[[], None]) -> tuple[int, str]:
        """Its exit code, negative for a signal, and the last test that it began."""
        said = self.folder / "said"
        said.write_text("")
        child = os.fork()
        if child == 0:
            code = KILLED
            try:
                os.setsid()
                nowhere = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):
                    os.dup2(nowhere, fd)
                try:
                    prepare()
                except (KeyError, ValueError, AttributeError, IndexError):  # a closure, or a scope made by a decorator
                    code = NO_PLACE
                else:
                    code = 0 if self._run(names, said) else KILLED
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # servers that its tests have left
        return os.waitstatus_to_exitcode(status), said.read_text()

    def _run(self, names: list[str], said: Path) -> bool:
        """Whether all of them pass."""
        items = [self._items[name] for name in names]
        for item, after in zip(items, [*items[1:], None], strict=True):
            said.write_text(item.nodeid)
            usual_s = self.seen.durations.get(item.nodeid, 1.0)
            signal.setitimer(signal.ITIMER_PROF, PATIENCE_S + SLOWER * usual_s)
            signal.setitimer(signal.ITIMER_REAL, WAITS_S + SLOWER * usual_s)
            if any(report.failed for report in runtestprotocol(item, nextitem=after, log=False)):
                return False
        return True


def try_all(
    seen: Seen,
    wanted: Sequence[tuple[str, Mapping[str, str]]],
    done: Callable[[str, Outcomes], None],
    ends_at: float,
    most_s: float,
) -> None:
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        trials = Trials(seen=seen, wanted=wanted, done=done, ends_at=ends_at, most_s=most_s, folder=Path(folder))
        options = ["-s", "-p", "no:terminal", f"--basetemp={folder}/tests", *OPTIONS, *folders_of_tests()]
        if pytest.main(options, plugins=[trials]) != 0:
            sys.exit("the tests can't be collected: python -m pytest --collect-only tests")


def source_hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def read_seen(results: Path) -> Seen:
    data = coverage.CoverageData(str(results / "coverage.data"))
    data.read()
    return Seen(data=data, durations=json.loads((results / "coverage.data.tests.json").read_text())["durations"])
