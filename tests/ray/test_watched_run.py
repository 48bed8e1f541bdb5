"""A whole run with `watch.port`: its page says that it lives, and its buttons pause and resume it.

The end of the page ends nothing."""

import json
import os
import signal
import urllib.request

import pytest

from launcher.base.addresses import free_port
from launcher.run_files.run_keys import read_watch_token
from scripts.run_control import state_of
from tests.programs.supervised_run import SupervisedRun, command_of
from tests.support.kept_runs import driver_of

pytestmark = pytest.mark.timeout(600)

STEPS = 40
"""More than it takes until the page has paused it."""


class Page:
    def __init__(self, run, port):
        self._run = run
        self._at = f"http://127.0.0.1:{port}"
        self.name = f"{run.paths.user}/{run.paths.experiment_name}/{run.paths.trial_name}"

    def _ask(self, path, data=None):
        headers = {"Authorization": f"Bearer {read_watch_token(self._run.paths.keys)}", "Origin": self._at}
        with urllib.request.urlopen(urllib.request.Request(self._at + path, data=data, headers=headers)) as said:
            return json.load(said)

    def look(self):
        return self._ask(f"/facts?run={self.name}")

    def push(self, what):
        return self._ask("/ask", json.dumps({"run": self.name, "what": what, "reason": "a test"}).encode())


def test_a_run_is_watched_paused_and_resumed_and_needs_no_page(tmp_path):
    port = free_port()
    with SupervisedRun(tmp_path, steps=STEPS, servers=1, settings=[f"watch.port={port}"]) as run:
        run.wait_steps(3)
        page = Page(run, port)
        run.wait_until(
            lambda: page.look()["servers"], "the driver, which looks once a second, has told the page of the server"
        )
        run.wait_until(lambda: page.look()["last_step"] >= 2, "the page has read the third step's line")
        said = page.look()
        assert said["life"]["live"] is True
        assert said["status"][0] == "RUNNING"
        assert said["last_step"] >= 2
        assert said["curves"]["series"]["grpo_actor/grad_norm"]["mean"]
        assert [one["name"] for one in said["servers"]] == ["server-0"]
        assert page.push("pause")["asked"].endswith(": a test")
        run.wait_until(lambda: state_of(run.paths)[0] == "PAUSED", "it is paused")
        run.wait_until(lambda: page.look()["status"][0] == "PAUSED", "the page says so")
        page.push("resume")
        run.wait_until(lambda: state_of(run.paths)[0] == "RUNNING", "it has resumed")
        children = driver_of(run.process.pid).children()
        (process,) = [one for one in children if "scripts.watch" in command_of(one)]  # others may end meanwhile
        os.kill(process.pid, signal.SIGKILL)
        printed = run.finish()
        assert f"watch it: http://127.0.0.1:{port}/ (its token is in" in printed
        assert read_watch_token(run.paths.keys) not in printed
        assert "the watch page has ended, with code -9; the run continues" in printed
        run.check_ledger()
        assert [line["global_step"] for line in run.ledger()] == list(range(STEPS))
