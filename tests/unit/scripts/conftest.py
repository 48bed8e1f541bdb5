"""A trial and an operator's tool on it; a fake run with real processes, for the tests of the fault injector."""

import os
import shutil
import signal

import pytest

from actors.processes.process_tree import descendants
from scripts.checkpoints import areal_processes
from tests.support.checkpoint_makers import learned, make_trial, snapshot, write_rewards
from tests.support.fault_game import FaultGame
from tests.support.trial_names import EXPERIMENT, NAMES, TRIAL, USER, trial_paths
from tests.support.worlds.checkpoints import HEALTHY


@pytest.fixture(autouse=True)
def only_of_this_test(monkeypatch):
    """A tool takes every process of the machine whose command names its trial for a run of it. A test in another
    process, or another test run, may have one of the same name: `python -m launcher … dry_run=true` was one."""
    monkeypatch.setattr(areal_processes, "all_processes", lambda: descendants(os.getpid()))


@pytest.fixture(scope="session")
def made_trial(tmp_path_factory):
    """Of ours, with five checkpoints; to be copied."""
    root = tmp_path_factory.mktemp("ours")
    make_trial(root / "root", learned(root / "model"), (5, 15, 25, 30, 38))
    return root / "root"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def trial(made_trial, root):
    """Of ours, which learned for 40 steps."""
    shutil.copytree(made_trial, root)
    write_rewards(trial_paths(root), HEALTHY)
    return trial_paths(root)


@pytest.fixture
def tool(request, root, capsys):
    """The TOOL of the test's module on the trial below `root`: its exit code, and what it said."""

    of_the_module = getattr(request.module, "NAMES", NAMES)

    def run(*flags, names=of_the_module):
        capsys.readouterr()  # what making the trial said
        code = request.module.TOOL.main(["--fileroot", str(root), *names, *map(str, flags)])
        return code, "".join(capsys.readouterr())

    return run


@pytest.fixture
def refused(tool, root):
    """What is said where nothing may change."""

    def run(*flags, code=1):
        before = snapshot(root)
        found, said = tool(*flags)
        after = snapshot(root)
        lock = f"logs/{USER}/{EXPERIMENT}/{TRIAL}/.run.lock"
        assert {**after, lock: None} == {**before, lock: None}
        assert found == code, said
        return said

    return run


@pytest.fixture
def game(tmp_path, request):
    game = FaultGame(tmp_path, getattr(request, "param", 2))
    handler = signal.getsignal(signal.SIGTERM)  # the command sets its own
    yield game
    signal.signal(signal.SIGTERM, handler)
    game.end()
