"""An error-free command prints our own lines only, also where no library has run before: in an empty HOME."""

import contextlib
import logging
import os
import re
import subprocess
import sys
import types
import warnings

import pytest

from launcher.cli.run_screen import log_to_file
from launcher.config.compose import REPOSITORY

STRAY = re.compile(r"HYDRA|WARNING|INFO|Warning|huggingface|ray::|it complains|it will change")

DRIVER = """
import logging, sys, warnings
import launcher.driver
from launcher.driver_process import main
from launcher.cli.run_screen import Screen
from launcher.run_files.run_paths import RunPaths

def warns(config, **_):
    paths = RunPaths.of(config)
    paths.prepare()
    with Screen(config, paths) as screen:
        screen.begin(1)
        logging.getLogger("a.library").warning("it complains")
        warnings.warn("it will change")
    return 0

launcher.driver.run = warns
sys.exit(main())
"""
COMMAND = f"""
import sys
from launcher.__main__ import main
from launcher.cli import keeper
keeper.DRIVER = ("-c", {DRIVER!r})
sys.exit(main())
"""


@pytest.fixture
def empty_home(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return kept | {"HOME": str(home), "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}


def command(environment, *words, begin=("-m", "launcher")):
    done = subprocess.run(
        [sys.executable, *begin, "conf=arithmetic_cpu", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_plan(empty_home, tmp_path):
    code, out, err = command(empty_home, "dry_run=true", f"cluster.fileroot={tmp_path}")
    assert (code, err) == (0, "")
    assert out.startswith("plan of arithmetic_cpu/trial0")
    assert not STRAY.search(out)


@pytest.mark.slow
def test_a_wrong_value_is_one_message(empty_home):
    code, out, err = command(empty_home, "actor.optimizer.lr=-1")
    assert (code, out) == (2, "")
    assert err.startswith("error: actor.optimizer.lr=-1: ")
    assert len(err.splitlines()) == 2


@pytest.mark.slow
def test_what_libraries_log_in_the_driver_is_in_its_log(empty_home, tmp_path):
    code, out, err = command(empty_home, f"cluster.fileroot={tmp_path}", begin=("-c", COMMAND))
    assert (code, err) == (0, "")
    assert not STRAY.search(out)
    (log,) = tmp_path.rglob("driver.log")
    assert "it complains" in log.read_text()
    assert "it will change" in log.read_text()


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """Root's logger as in a process of its own; returns the folder of the logs, which is not there."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    logging.captureWarnings(False)  # another test's, which would keep this one's from being captured
    log_to_file(types.SimpleNamespace(logs=tmp_path / "logs"))
    yield tmp_path / "logs"
    logging.captureWarnings(False)
    with contextlib.suppress(OSError):  # of a full disk, as logging ignores it at exit
        logging.root.handlers[0].close()


def test_a_disk_that_refuses_the_drivers_log_ends_nothing(logged, capsys):
    logging.getLogger("a.library").warning("it complains of %s", "this")
    warnings.warn("it will change", FutureWarning, stacklevel=1)
    err = capsys.readouterr().err
    assert "it complains of this\n" in err
    assert "it will change" in err
    assert "Traceback" not in err
    logged.mkdir()
    logging.getLogger("a.library").warning("it complains again")
    assert re.fullmatch(r"\S+ \S+ WARNING a\.library: it complains again\n", (logged / "driver.log").read_text())
    assert capsys.readouterr().err == ""


def test_a_full_disk_does_not_fill_the_screen(logged, capsys):
    logged.mkdir()
    (logged / "driver.log").symlink_to("/dev/full")
    logging.getLogger("a.library").warning("it complains")
    assert capsys.readouterr().err == "it complains\n"
