"""`keep_alive=true`: a killed driver is begun again within a budget; any end of its own is the command's."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from actors.processes.process_tree import children, identify, send
from launcher.cli import keep_alive
from launcher.cli.keep_alive import KEPT, BeginAgain, EndWith, KeepTask, after_end
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.config.supervision import RestartConfig
from launcher.config.supervision_checks import find_contradictions
from launcher.run_files.journal import append_line, read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.machine import scaled, wait_until

TASK = KeepTask(logs="", restart=RestartConfig())
DRIVER = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
number = len(list(folder.glob("begun-*")))
heard = []
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(one, lambda got, frame: heard.append(got))
facts = {"pid": os.getpid(), "killed": os.environ.get("GRPO_KILLED"), "kept": os.environ["GRPO_KEPT"]}
(folder / "new").write_text(json.dumps(facts))
(folder / "new").rename(folder / f"begun-{number}")
while not heard:
    time.sleep(0.01)
(folder / "heard").write_text(signal.Signals(heard[0]).name)
sys.exit(int(sys.argv[2]))
"""


def after(returned, killed_at=(), *, now=100.0, progress_at=None, asked=None, **task):
    kept = dataclasses.replace(TASK, **task)
    return after_end(returned, killed_at, kept, now=now, progress_at=progress_at, asked=asked)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75, 130])
def test_an_exit_code_is_the_driver_s_own_word(code):
    assert after(code) == EndWith(code=code)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_killed_driver_is_begun_again_at_once(number):
    assert after(-number) == BeginAgain(not_before=100.0, reason=f"the driver was ended by {number.name}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_driver_that_was_asked_to_end_is_not(number):
    assert after(-number) == EndWith(code=130, reason=f"ended by the user; the driver was ended by {number.name}")


def test_one_that_was_killed_after_a_signal_was_passed_on_is_not():
    assert after(-signal.SIGKILL, asked=signal.SIGTERM).code == 130


def test_a_driver_that_is_killed_with_its_machine_is_for_the_same_command_to_resume():
    reason = "the machine is taken away (SIGUSR1); the driver was ended by"
    assert after(-signal.SIGUSR1) == EndWith(code=75, reason=f"{reason} SIGUSR1")
    assert after(-signal.SIGKILL, asked=signal.SIGUSR1) == EndWith(code=75, reason=f"{reason} SIGKILL")


def test_the_waits_double_and_the_budget_ends():
    assert after(-9, [99.0]).not_before == 100.0, "a second after the last, which has passed"
    assert after(-9, [98.0, 99.5]).not_before == 101.5
    ended = after(-9, [97.0, 98.0, 99.0])
    assert (ended.code, ended.reason) == (
        3,
        "the driver was ended by SIGKILL; 3 before it brought no further step (restart.driver)",
    )


def test_a_further_step_refills_the_budget():
    assert isinstance(after(-9, [97.0, 98.0, 99.0], progress_at=100.0), BeginAgain)


def test_without_a_budget_it_ends_and_a_joined_cluster_gets_the_time_of_a_lease():
    assert after(-9, restart=RestartConfig(driver=0)) == EndWith(code=3, reason="the driver was ended by SIGKILL")
    assert after(-9, least_wait_s=15.0).not_before == 115.0


# ── with real processes ──


class Kept:
    """A keeper over a stand-in for the driver, which ends with `code` when it gets a signal."""

    def __init__(self, folder, *, code=0, **restart):
        self.folder = folder
        config = RunConfig(experiment_name="kept", train_dataset=DatasetConfig(path="none"))
        config.cluster.fileroot = str(folder / "root")
        self.paths = RunPaths.of(config)
        self.paths.prepare()
        append_line(self.paths.events, {"event": "run.started", "attempt": 4})
        task = KeepTask(logs=str(self.paths.logs), restart=RestartConfig(**restart))
        driver = [sys.executable, "-c", DRIVER, str(folder), str(code)]
        command = [sys.executable, "-m", keep_alive.__name__, json.dumps(dataclasses.asdict(task)), *driver]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def begun(self, number):
        """What the driver of that number has seen."""
        file = self.folder / f"begun-{number}"
        return json.loads(wait_until(lambda: file.exists() and file.read_text()))

    def step(self, number):
        append_line(self.paths.ledger, {"global_step": number})

    def ends(self):
        return self.process.wait(scaled(60))

    def said(self):
        return self.process.communicate(timeout=scaled(60))[1]


@pytest.fixture
def kept(tmp_path):
    started = []

    def start(**options):
        started.append(Kept(tmp_path, **options))
        return started[-1]

    yield start
    for one in started:
        drivers = children(one.process.pid)
        one.process.kill()
        for driver in drivers:
            send(driver, signal.SIGKILL)  # or it has ended since, for its keeper is gone
        one.process.communicate()


def test_a_killed_driver_is_followed_by_one_that_knows_of_it(kept):
    one = kept()
    first = one.begun(0)
    assert (first["killed"], first["kept"]) == (None, f"{one.process.pid}:{first['kept'].split(':')[1]}:0")
    os.kill(first["pid"], signal.SIGKILL)
    second = one.begun(1)
    known = json.loads(second["killed"])
    assert (known["how"], known["times"], known["mark"]) == ("SIGKILL", 1, f"{KEPT}={first['kept']}")
    assert second["kept"] != first["kept"], "what the first has left is told from what this one starts"
    os.kill(one.process.pid, signal.SIGTERM)
    assert one.ends() == 0
    assert "keep_alive: the driver was ended by SIGKILL; it is begun again in 0 s" in one.said()
    assert [line["event"] for line in read_lines(one.paths.events)] == ["run.started"], "it has ended by itself"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_once_and_the_exit_code_back(kept, number):
    one = kept(code=7)
    one.begun(0)
    os.kill(one.process.pid, number)
    assert one.ends() == 7
    assert (one.folder / "heard").read_text() == number.name


def test_a_keeper_that_is_killed_has_its_driver_save_and_end(kept):
    one = kept()
    driver = identify(one.begun(0)["pid"])
    one.process.kill()
    wait_until(lambda: identify(driver.pid) != driver)
    assert (one.folder / "heard").read_text() == "SIGINT"


def test_one_that_is_killed_again_and_again_ends_the_run_with_a_status(kept):
    one = kept(driver=1)
    for number in range(2):
        os.kill(one.begun(number)["pid"], signal.SIGKILL)
    assert one.ends() == 3
    assert "1 before it brought no further step (restart.driver)\n  → the same command resumes" in one.said()
    ended = list(read_lines(one.paths.events))[-1]
    assert (ended["event"], ended["attempt"], ended["exit_code"]) == ("run.errored", 4, 3)


def test_steps_between_the_kills_refill_the_budget(kept):
    one = kept(driver=1)
    for number in range(3):
        driver = one.begun(number)["pid"]
        one.step(number)
        os.kill(driver, signal.SIGKILL)
    assert json.loads(one.begun(3)["killed"])["times"] == 3


def test_the_next_driver_is_told_the_settings_that_the_first_one_of_the_command_began_with(kept):
    """Earlier commands have begun the run too, with other settings; each later driver writes what it got again."""
    one = kept()
    known = []
    for number, settings in enumerate(("config.attempt5.yaml", "config.attempt6.yaml")):
        driver = one.begun(number)["pid"]
        begins = {"event": "run.started", "monotonic": time.monotonic(), "settings": settings}
        append_line(one.paths.events, begins)
        os.kill(driver, signal.SIGKILL)
        known.append(json.loads(one.begun(number + 1)["killed"])["settings"])
    assert known == [str(one.paths.logs / "config.attempt5.yaml")] * 2


def test_a_driver_that_was_killed_before_it_began_the_run_leaves_no_settings(kept):
    one = kept()
    append_line(one.paths.events, {"event": "run.started", "monotonic": 0.5, "settings": "config.yaml"})
    os.kill(one.begun(0)["pid"], signal.SIGKILL)
    assert json.loads(one.begun(1)["killed"])["settings"] == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_while_it_waits_ends_the_run(kept, number, code):
    one = kept(wait_initial_s=600.0, wait_max_s=600.0, window_s=3600.0)
    for begun in range(2):
        os.kill(one.begun(begun)["pid"], signal.SIGKILL)
    assert "it is begun again in 0 s" in one.process.stderr.readline()
    assert "it is begun again in" in one.process.stderr.readline()
    os.kill(one.process.pid, number)
    assert one.ends() == code
    ended = list(read_lines(one.paths.events))[-1]
    assert (ended["event"], ended["exit_code"]) == ("run.aborted", code)
    assert not (one.folder / "begun-2").exists()


def test_the_keeper_is_small(kept):
    one = kept()
    one.begun(0)
    maps = Path(f"/proc/{one.process.pid}/maps").read_text()
    assert not [name for name in ("torch", "_raylet", "pydantic", "numpy") if name in maps]
    assert psutil.Process(one.process.pid).memory_info().rss < 40 * 2**20


# ── how a command becomes one ──


def wanted(**more):
    config = RunConfig(experiment_name="kept", keep_alive=True, train_dataset=DatasetConfig(path="none"))
    for key, value in more.items():
        section, _, name = key.partition("__")
        setattr(getattr(config, section), name, value)
    return config


def test_the_same_command_is_executed_below_the_keeper_and_only_once(monkeypatch):
    executed = []
    monkeypatch.setattr(os, "execv", lambda path, command: executed.append(command))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "launcher", "conf=arithmetic_cpu", "keep_alive=true"])
    keep_alive.begin(wanted(cluster__address="10.0.0.1:6379"))
    (command,) = executed
    assert command[:3] == [sys.executable, "-m", "launcher.cli.keep_alive"]
    assert json.loads(command[3])["least_wait_s"] == 15.0
    assert command[4:] == [sys.executable, "-m", "launcher", "conf=arithmetic_cpu", "keep_alive=true"]
    monkeypatch.setenv(KEPT, f"{os.getppid()}:name:0")
    keep_alive.begin(wanted())
    keep_alive.begin(RunConfig(experiment_name="not", train_dataset=DatasetConfig(path="none")))
    assert len(executed) == 1


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (wanted(recover__mode="off"), "false with recover.mode=off, which resumes nothing"),
        (
            wanted(cluster__detached=True, cluster__address="10.0.0.1:6379"),
            "false with cluster.detached=true: Ray starts the driver of a detached run again",
        ),
    ],
)
def test_settings_that_contradict_it_are_refused(config, says):
    assert ("keep_alive", says) in list(find_contradictions(config))
