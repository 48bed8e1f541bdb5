"""A trial and an operator's tool on it; a fake run with real processes, for the tests of the fault injector."""

import shutil
import signal

import pytest

from tests.support.checkpoint_makers import learned, make_trial, snapshot, write_rewards
from tests.support.fault_game import FaultGame
from tests.support.trial_names import EXPERIMENT, NAMES, TRIAL, USER, trial_paths
from tests.unit.launcher.checkpoints.test_recorded_health import HEALTHY


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

    def run(*flags, names=NAMES):
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
