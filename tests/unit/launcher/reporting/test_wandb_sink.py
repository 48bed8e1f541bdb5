"""WandB: what it gets, and that a run never waits for it nor ends by it."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from launcher.config.reporting import WandbConfig
from launcher.reporting import wandb_sink
from launcher.reporting.wandb_sink import WandbSink, wandb_run_id
from tests.support.machine import scaled
from tests.support.wandb_file import history, metric_steps, records, run_record

REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    """No key and no server from the surroundings; files of wandb's own stay here."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-own"))


def sink(paths, *, mode, said=None, **config):
    return WandbSink(
        WandbConfig(mode=mode, **config),
        paths,
        settings={"seed": 1, "actor": {"path": "m"}},
        say=(said if said is not None else []).append,
    )


def line(step, reward):
    return {"global_step": step, "rollout/reward": reward}


def offline_file(paths):
    (file,) = (paths.logs / "wandb").glob("offline-run-*/run-*.wandb")
    return file


@pytest.mark.parametrize(
    ("names", "run_id"),
    [
        (("gsm8k", "trial0"), "gsm8k_trial0_train"),
        (("a b", "t:1"), "a-b_t-1_train-"),
        (("x" * 200, "t0"), "x" * 119 + "-"),
    ],
)
def test_the_id_is_areals_where_wandb_accepts_it(names, run_id):
    found = wandb_run_id(*names)
    assert found.startswith(run_id)
    assert len(found) <= 128
    assert (found == run_id) == (not run_id.endswith("-"))


def test_two_trials_never_share_an_id():
    assert len({wandb_run_id("a b", "t"), wandb_run_id("a:b", "t"), wandb_run_id("a-b", "t")}) == 3


def test_disabled_does_not_even_import_wandb(tmp_path):
    program = (
        "import sys; from launcher.config.reporting import WandbConfig\n"
        "from launcher.reporting.wandb_sink import WandbSink\n"
        "sink = WandbSink(WandbConfig(), None, settings={}, say=print)\n"
        "sink.log({'global_step': 1}); sink.finish(); print('wandb' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_offline_keeps_every_line_over_global_step_across_a_restore(paths):
    said = []
    wandb = sink(paths, mode="offline", said=said, group="g", tags=["a"])
    lines = [line(0, 0.1), line(1, 0.2), line(2, float("nan")), line(1, 0.25), line(2, 0.3)]
    for values in lines:
        wandb.log(values)
    wandb.finish()
    file = offline_file(paths)
    assert list(history(file)) == [pytest.approx(values, nan_ok=True) for values in lines]
    assert metric_steps(file)["*"] == "global_step"
    run = run_record(file)
    assert (run.run_id, run.project, run.run_group, list(run.tags)) == ("exp_t0_train", "exp", "g", ["a"])
    assert (said, wandb.missed) == ([], 0)


@pytest.mark.slow
def test_an_alert_reaches_wandb_beside_the_metrics(paths):
    wandb = sink(paths, mode="offline")
    wandb.alert("incident 1 began: server_hang", "server-0: stopped for 3.1 s")
    wandb.log(line(0, 0.1))
    wandb.finish()
    (alert,) = [r.alert for r in records(offline_file(paths)) if r.WhichOneof("record_type") == "alert"]
    assert (alert.title, alert.text) == ("incident 1 began: server_hang", "server-0: stopped for 3.1 s")
    assert list(history(offline_file(paths))) == [line(0, 0.1)]
    assert wandb.missed == 0


@pytest.mark.slow
def test_without_a_key_it_says_so_once_and_goes_on_offline(paths):
    said = []
    wandb = sink(paths, mode="online", said=said)
    wandb.log(line(0, 0.5))
    wandb.finish()
    assert wandb.mode == "offline"
    assert len(said) == 1
    assert "offline: no API key" in said[0]
    assert list(history(offline_file(paths))) == [line(0, 0.5)]


@pytest.mark.slow
def test_without_a_server_it_says_so_once_and_goes_on_offline(paths, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    with socket.socket() as taken:  # bound, never listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(wandb_sink, "INIT_TIMEOUT_S", 1.0)
        said = []
        wandb = sink(paths, mode="online", said=said)
        wandb.log(line(0, 0.5))
        wandb.finish()
    assert wandb.mode == "offline"
    assert len(said) == 1
    assert "WandB continues offline" in said[0]
    assert "\n" not in said[0]
    assert list(history(offline_file(paths))) == [line(0, 0.5)]


class BrokenRun:
    def log(self, values):
        raise BrokenPipeError("service is gone")

    def finish(self):
        raise BrokenPipeError("service is gone")


def test_a_wandb_that_fails_at_every_line_is_counted_and_said_once(paths, monkeypatch):
    monkeypatch.setattr(WandbSink, "_start", lambda self: BrokenRun())
    said = []
    wandb = sink(paths, mode="offline", said=said)
    for step in range(5):
        wandb.log(line(step, 0.5))
    wandb.finish()
    assert wandb.missed == 5
    assert len(said) == 2
    assert "misses steps: service is gone" in said[0]
    assert "WandB is off" in said[1]


def test_a_wandb_that_cant_be_imported_is_off(paths, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    said = []
    wandb = sink(paths, mode="offline", said=said)
    wandb.finish()
    wandb.log(line(0, 0.5))
    assert wandb.mode == "disabled"
    assert "WandB is off" in said[0]


def test_a_wandb_that_hangs_never_makes_the_run_wait(paths, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(WandbSink, "_start", lambda self: released.wait() and BrokenRun())
    monkeypatch.setattr(wandb_sink, "MOST_QUEUED", 3)
    monkeypatch.setattr(wandb_sink, "FINISH_TIMEOUT_S", 0.0)
    monkeypatch.setattr(wandb_sink, "HANGING_AFTER_S", 0.0)
    said = []
    wandb = sink(paths, mode="offline", said=said)
    for step in range(5):
        wandb.log(line(step, 0.5))
    wandb.finish()
    released.set()
    assert wandb.missed == 2
    assert "takes no lines" in said[0]
    assert "wandb sync" in said[1]


HANG_THE_SERVICE = """
import signal, sys, time, psutil
from launcher.reporting import wandb_sink
from launcher.config.reporting import WandbConfig
from launcher.run_files.run_paths import RunPaths
wandb_sink.FINISH_TIMEOUT_S, wandb_sink.HANGING_AFTER_S = 0.5, 0.5
paths = RunPaths(fileroot=sys.argv[1], user="ann", experiment_name="exp", trial_name="t0")
sink = wandb_sink.WandbSink(WandbConfig(mode="offline"), paths, settings={}, say=print)
sink.log({"global_step": 0})
while not list(paths.logs.glob("wandb/offline-run-*/run-*.wandb")):
    time.sleep(0.02)
(service,) = [child for child in psutil.process_iter(["name", "ppid"]) if child.info["name"] == "wandb-core"
              and child.info["ppid"] == psutil.Process().pid]
service.send_signal(signal.SIGSTOP)
sink.log({"global_step": 1})
sink.finish()
print(service.pid, "over")
"""


@pytest.mark.slow
def test_a_stopped_service_delays_neither_the_end_of_the_run_nor_the_exit(paths):
    program = [sys.executable, "-c", HANG_THE_SERVICE, str(paths.fileroot)]
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, timeout=scaled(60), check=False)
    said, last = done.stdout.splitlines()
    assert "did not finish in time" in said
    pid, word = last.split()
    assert word == "over"
    assert not psutil.pid_exists(int(pid))
    assert (done.returncode, done.stderr) == (0, "")
