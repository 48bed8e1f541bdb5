"""Which tests are run without an option, with which, and what the last line says of the others (tests/conftest.py)."""

import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests import conftest

RAY_FILE, UNIT_FILE = conftest.TESTS / "ray" / "test_x.py", conftest.UNIT / "launcher" / "test_x.py"
REPOSITORY = conftest.TESTS.parent


class Item:
    def __init__(self, path: Path, *names: str):
        self.path = path
        self.marks = [getattr(pytest.mark, name) for name in names]

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark):
        self.marks.append(mark)


def collected(path, *names, options=(), arguments=("tests",)):
    """The item after the collection."""
    item = Item(path, *names)
    config = SimpleNamespace(args=[*arguments], getoption=lambda name: name in options)
    conftest.pytest_collection_modifyitems(config, [item])
    return item


def is_run(*where, **how):
    return collected(*where, **how).get_closest_marker("skip") is None


def test_a_folder_below_a_folder_of_whole_runs_is_slow_too():
    assert not is_run(RAY_FILE.parent / "driver" / "test_x.py")


@pytest.mark.parametrize(
    ("path", "names", "needs"),
    [
        (UNIT_FILE, (), None),
        (UNIT_FILE, ("slow",), "--all"),
        (RAY_FILE, (), "--all"),
        (RAY_FILE, ("quick",), None),
        (RAY_FILE, ("long",), "--long"),
        (UNIT_FILE, ("long",), "--long"),
    ],
)
def test_each_tier_is_run_with_its_option_and_by_the_one_above(path, names, needs):
    assert is_run(path, *names) == (needs is None)
    assert is_run(path, *names, options=["--all"]) == (needs != "--long")
    assert is_run(path, *names, options=["--long"])


@pytest.mark.parametrize("argument", [str(RAY_FILE), f"{RAY_FILE}::test_one"])
def test_a_slow_test_that_is_named_by_its_file_is_run_and_a_long_one_is_not(argument):
    assert is_run(RAY_FILE, arguments=[argument])
    assert not is_run(RAY_FILE.with_name("test_y.py"), arguments=[argument])
    assert not is_run(RAY_FILE, "long", arguments=[argument])


def test_a_system_test_is_chosen_by_the_marker_slow():
    assert collected(RAY_FILE).get_closest_marker("slow")
    assert not collected(RAY_FILE, "quick").get_closest_marker("slow")


@pytest.mark.parametrize(
    ("source", "changes", "processes", "dist"),
    [
        ("TESTPATHS", {}, 2, "loadfile"),
        ("TESTPATHS", {"numprocesses": 3}, 3, "loadfile"),
        ("TESTPATHS", {"numprocesses": 0}, 0, "no"),
        ("TESTPATHS", {"capture": "no"}, None, "no"),
        ("TESTPATHS", {"usepdb": True}, None, "no"),
        ("ARGS", {}, None, "no"),
    ],
)
def test_all_tests_are_run_by_two_processes_and_named_ones_by_one(source, changes, processes, dist):
    given = {"numprocesses": None, "dist": "no", "capture": "fd", "usepdb": False, "collectonly": False} | changes
    kinds = pytest.Config.ArgsSource
    config = SimpleNamespace(args_source=kinds[source], ArgsSource=kinds, option=SimpleNamespace(**given))
    conftest.pytest_cmdline_main(config)
    assert (config.option.numprocesses, config.option.dist) == (processes, dist)
    named = SimpleNamespace(args_source=kinds[source], ArgsSource=kinds, option=SimpleNamespace(capture="fd"))
    conftest.pytest_cmdline_main(named)
    assert vars(named.option) == {"capture": "fd"}, "without pytest-xdist"


def test_no_test_begins_after_the_end_and_whole_runs_are_the_last():
    unit, ray = Item(UNIT_FILE), Item(RAY_FILE)
    items = [ray, unit]
    config = SimpleNamespace(args=["tests"], getoption={"--all": True, "--long": False, "--ends-at": 1.0}.get)
    conftest.pytest_collection_modifyitems(config, items)
    assert items == [unit, ray]
    unit.config = config
    with pytest.raises(pytest.skip.Exception, match="time: "):
        conftest.pytest_runtest_setup(unit)
    config.getoption = {"--ends-at": time.time() + 3600}.get
    conftest.pytest_runtest_setup(unit)


def test_another_day_begins_with_other_whole_runs():
    files = [conftest.TESTS / "e2e" / f"test_{letter}.py" for letter in "abcdefgh"]
    orders = [sorted(files, key=lambda file: conftest.turn(file, day=day)) for day in range(20)]
    backwards = files[::-1]
    assert orders[0] == sorted(backwards, key=lambda file: conftest.turn(file, day=0)), "the same in each process"
    assert {order[0] for order in orders} == set(files)


def test_a_unit_test_that_hangs_ends_after_a_minute(request):
    assert request.node.get_closest_marker("timeout").args == (conftest.UNIT_TIMEOUT_S,) == (60,)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("Skipped: slow: --all runs it", "slow (pytest --all runs them)"),
        ("long: --long runs it", "long (pytest --long runs them)"),
        ("time: --ends-at is past", "for want of time (--ends-at)"),
        ("only root can become another account to attack from", "for want of root"),
        ("network namespaces need root", "for want of root"),
        ("root may write everywhere", "because root is not refused anything"),
        ("no memory cgroup of version 1 that may be written to", "for want of a memory cgroup"),
        ("s3:// comes with the extra `s3`", "because s3:// comes with the extra `s3`"),
    ],
)
def test_why_something_is_not_run(reason, kind):
    assert conftest.kind_of(reason) == kind


@pytest.mark.slow
def test_the_last_line_counts_what_is_not_run():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/chaos"]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout
    (line,) = (line for line in said.splitlines() if line.startswith("not run: "))
    assert "slow (pytest --all runs them)" in line
    assert "long (pytest --long runs them)" in line


WORKFLOW = REPOSITORY / ".github" / "workflows" / "ci.yml"


@pytest.mark.parametrize(("key", "exit_code"), [("runs-on", 0), ("run-on", 1)])
def test_the_workflow_has_the_form_that_github_takes(tmp_path, key, exit_code):
    """Nobody runs it before it is on GitHub."""
    (tmp_path / "ci.yml").write_text(WORKFLOW.read_text().replace("runs-on", key))
    command = [Path(sys.executable).parent / "check-jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, tmp_path / "ci.yml"], capture_output=True, text=True, check=False)
    assert done.returncode == exit_code, done.stdout


def test_the_workflow_and_ci_run_have_the_same_parts():
    script = (REPOSITORY / ".ci" / "run").read_text()
    workflow = yaml.safe_load(WORKFLOW.read_text())
    jobs, crons = workflow["jobs"], {one["cron"] for one in workflow[True]["schedule"]}  # YAML 1.1 reads `on` as true
    conditions = " ".join(job.get("if", "") for job in jobs.values())
    assert {*re.findall(r"github\.event\.schedule == '(.+?)'", conditions)} == crons
    asked = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    parts = {line.removeprefix("bash .ci/run ") for line in asked}
    known = {*re.findall(r"all \| (.+)\) ;;", script)[0].split(" | ")}
    assert parts == known == {"quick", "checks", "slow", "long"}
    command = ["bash", str(REPOSITORY / ".ci" / "run"), "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "it is quick, checks, slow, long" in done.stdout) == (2, True), done.stdout + done.stderr
