"""Which tests are run: the quick ones with every change, all before a claim is made (tests/README.md).

--all              tests marked `slow` too; one that is named on the command line by its file is run without it
--long             tests marked `long` too, and `slow` ones: the same as others, with more or longer faults
--kills N          so many, in the tests of tests/chaos that draw by chance
--minutes N        how long tests/chaos/test_soak.py leaves a run alone
--real-servers     the real SGLang in tests/chaos/test_lost_nodes.py, in place of stand-ins
--ends-at S        no test begins after this time, in seconds since 1970; the last line counts those that did not
"""

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.programs", "tests.support")  # else a check that fails there says nothing else

from tests.support.machine import factor  # noqa: E402

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the tests start some thousand processes
sys.dont_write_bytecode = False
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")  # how fast examples are drawn and tried says how busy the machine is

TESTS = Path(__file__).parent
SYSTEM = (TESTS / "ray", TESTS / "chaos", TESTS / "e2e")
"""Folders of tests that start whole runs, and are slow but for those marked `quick`."""
UNIT = TESTS / "unit"
UNIT_TIMEOUT_S = 60
"""Of a unit test that hangs; pyproject.toml has that of the others."""
KINDS = {
    "slow: ": "slow (pytest --all runs them)",
    "long: ": "long (pytest --long runs them)",
    "time: ": "for want of time (--ends-at)",
    "cgroup": "for want of a memory cgroup",
    "mount": "because nothing can be mounted here (needs root)",
    "root may": "because root is not refused anything",
    "root": "for want of root",
    "GPU": "because there is a GPU here",
}
"""What the reasons of skipped tests have in common: part of the reason, and what the last line says."""


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="tests marked `slow` too")
    parser.addoption("--long", action="store_true", help="tests marked `long` and `slow` too")
    parser.addoption("--kills", type=int, default=None, help="of the tests in tests/chaos, in place of a few")
    parser.addoption("--minutes", type=float, default=5.0, help="of tests/chaos/test_soak.py")
    parser.addoption("--real-servers", action="store_true", help="the real SGLang in tests/chaos/test_lost_nodes.py")
    parser.addoption("--ends-at", type=float, default=None, help="no test begins after it; seconds since 1970")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's own
def pytest_cmdline_main(config):
    """Where nothing is named, two processes share the tests. A file is one process's: its tests share what one of them
    has started. Nothing is changed in such a process itself, for -s and --pdb, or where pytest-xdist is missing."""
    option = config.option
    if not hasattr(option, "numprocesses") or hasattr(config, "workerinput"):
        return
    is_whole = config.args_source is config.ArgsSource.TESTPATHS
    is_seen = option.capture == "no" or option.usepdb or option.collectonly
    if option.numprocesses is None and is_whole and not is_seen:
        option.numprocesses = 2
    if option.numprocesses and option.dist == "no":
        option.dist = "loadfile"
        option.loadscopereorder = False  # as they are collected: whole runs first, but for --ends-at


@pytest.hookimpl(tryfirst=True)  # before `-m slow` chooses among them
def pytest_collection_modifyitems(config, items):
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    runs_slow = config.getoption("--all") or config.getoption("--long")
    if ends_at := config.getoption("--ends-at"):
        items.sort(key=lambda item: turn(item.path, day=int(ends_at // 86400)))
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in SYSTEM) and not item.get_closest_marker("quick"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long: --long runs it"))
        elif item.get_closest_marker("slow") and not runs_slow and item.path not in named:
            item.add_marker(pytest.mark.skip(reason="slow: --all runs it"))
        if item.path.is_relative_to(UNIT) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(UNIT_TIMEOUT_S))


def turn(path, *, day):
    """What is left out for want of time are a few whole runs, and not all that is cheap; on another day other ones."""
    drawn = random.Random(f"{day} {path.name}").random() if path.is_relative_to(SYSTEM[-1]) else 0.0
    return [path.is_relative_to(folder) for folder in reversed(SYSTEM)], drawn


@pytest.hookimpl(tryfirst=True)  # before a module's fixture starts a run
def pytest_runtest_setup(item):
    ends_at = item.config.getoption("--ends-at")
    if ends_at and time.time() > ends_at:
        pytest.skip("time: --ends-at is past")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported stays: a seventh of the collection's time went into looking it through for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True)
def _signals_as_before():
    """The launcher's entry point holds SIGUSR1 back, as a process's own: later tests' children would inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture(autouse=True)
def _environment_as_before():
    """A tool that hides the GPUs from its own process hid them from the Ray cluster of a later test."""
    before = dict(os.environ)
    yield
    changed = {name for name, _ in before.items() ^ os.environ.items()} - {"PYTEST_CURRENT_TEST"}
    for name in changed:  # and no other: a thread that reads the environment meanwhile may end the process
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Else what a test draws hangs on the tests that ran before it, and one day in twenty it fails, or sees nothing."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # manual_seed notes the stack for each kind of device: 1 ms a test


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """A busy machine has more time: a test that fails for the load says nothing of what it tests."""
    scaled = settings._replace(timeout=settings.timeout * factor())
    return pytest_timeout.pytest_timeout_set_timer(item, scaled)


def pytest_terminal_summary(terminalreporter):
    """One line on what was not run, and why."""
    skipped = Counter(kind_of(report.longrepr[2]) for report in terminalreporter.getreports("skipped"))
    if skipped:
        told = "; ".join(f"{count} {kind}" for kind, count in skipped.most_common())
        terminalreporter.write_line(f"not run: {told}")


def kind_of(reason: str) -> str:
    reason = reason.removeprefix("Skipped: ")
    return next((kind for part, kind in KINDS.items() if part in reason), f"because {reason}")


@pytest.fixture
def kills(request):
    """`kills(6)`: how many to make, 6 unless --kills says otherwise."""
    return lambda few: request.config.getoption("--kills") or few


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "docs", "outputs", "tests")
    shutil.copytree(TESTS.parent, folder / "source", ignore=left_out)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source"))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def site(wheel, tmp_path_factory):
    """The folder in which the wheel is installed; its dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", str(folder), str(wheel))
    return folder


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *words], check=True, cwd="/")
