"""An error-free command prints our own lines only, also where no library has run before: in an empty HOME."""

import os
import re
import subprocess
import sys

import pytest

from launcher.config.compose import REPOSITORY

STRAY = re.compile(r"HYDRA|WARNING|INFO|Warning|font|matplotlib|huggingface|ray::|it complains|it will change")

DRIVER = """
import logging, sys, warnings
import launcher.driver
from launcher.__main__ import main
from launcher.cli.run_screen import Screen
from launcher.reporting.png_figure import write_png
from launcher.run_files.run_paths import RunPaths

def draws(config):
    paths = RunPaths.of(config)
    paths.prepare()
    with Screen(config, paths) as screen:
        screen.begin(1)
        write_png(lambda figure: figure.subplots().set_title("fonts"), paths.curve, remedy="")
        import matplotlib.font_manager
        matplotlib.font_manager.findfont("no such font")
        logging.getLogger("a.library").warning("it complains")
        warnings.warn("it will change")
    return 0

launcher.driver.run = draws
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
    )
    return done.returncode, done.stdout, done.stderr


def test_a_plan(empty_home, tmp_path):
    code, out, err = command(empty_home, "dry_run=true", f"cluster.fileroot={tmp_path}")
    assert (code, err) == (0, "")
    assert out.startswith("plan of arithmetic_cpu/trial0") and not STRAY.search(out)


def test_a_wrong_value_is_one_message(empty_home):
    code, out, err = command(empty_home, "actor.optimizer.lr=-1")
    assert (code, out) == (2, "")
    assert err.startswith("error: actor.optimizer.lr=-1.0") and len(err.splitlines()) == 2


@pytest.mark.slow
def test_what_libraries_log_in_the_driver_is_in_its_log(empty_home, tmp_path):
    code, out, err = command(empty_home, f"cluster.fileroot={tmp_path}", begin=("-c", DRIVER))
    assert (code, err) == (0, "")
    assert not STRAY.search(out)
    (log,) = tmp_path.rglob("driver.log")
    assert "it complains" in log.read_text() and "it will change" in log.read_text()
