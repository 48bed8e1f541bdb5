"""The Coordinator of a command and of the servers behind its door, without Ray: real processes of stand-in servers,
real plans, the real door, and a client that asks, pauses and updates while servers are killed and stopped."""

import asyncio
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from actors.foreign import door_actor
from actors.foreign.command_cluster import CommandCoordinator
from actors.foreign.fleet import DoorHandle, FleetObserver
from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.reward_series import RewardSeries
from actors.serving.server_incarnation import ReadinessProof, ServerSpec
from actors.serving.sglang_server import SGLangProcess
from actors.supervision.oom_backoff import OomBackoff
from launcher.base.messages import ServerInfo, ServerState, TerminalStatus, TrainerView
from launcher.config.schema import RolloutConfig, RunConfig, SGLangConfig
from launcher.config.supervision import RestartConfig
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_keys import SERVERS, ServerKeys
from launcher.run_files.run_paths import RunPaths
from tests.support.fake_actors import Method
from tests.support.machine import scaled
from tests.support.run_memory import history_of
from tests.support.worlds.door import stepping

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
MODEL = Path(__file__).parents[4] / "assets" / "arithmetic" / "model"
ENTRY = (sys.executable, "-m", "tests.programs.stand_in_server", "--truthful", "--seconds-per-token", "0.01")


class Local:
    """An object of this process, asked as an actor."""

    def __init__(self, made, **instead):
        self._made = made
        self._instead = instead

    def __getattr__(self, name):
        return Method(self._instead.get(name) or getattr(self._made, name))


class Stepping:
    """The command that the test is, in the place of a CommandTrainer."""

    incident, pid, next_step, stop_s, report_every, done = None, 0, 0, 0.0, 1, ""
    progress = SimpleNamespace(at=lambda subject: None)

    def facts(self):
        return stepping(is_finished=bool(self.done), told=self.done)

    def begin(self):
        """It steps already."""

    async def halt(self, *, reinstates):
        assert not reinstates

    async def close(self):
        """Nothing of it runs."""


class Behind:
    """A run whose command is the test."""

    def __init__(self, folder, monkeypatch, servers):
        monkeypatch.setattr(door_actor, "listening_address", lambda host: host)
        monkeypatch.setattr(door_actor, "this_node", lambda: "")
        monkeypatch.setattr(door_actor, "bind_to_cluster", lambda config: None)
        sglang = SGLangConfig(n_servers=servers, model_path=str(MODEL), device="cpu", dtype="float32", random_seed=1)
        self.config = RunConfig(
            experiment_name="behind",
            sglang=sglang,
            rollout=RolloutConfig(request_timeout=60.0, stream_interval=4, setup_timeout=scaled(60)),
            restart=RestartConfig(wait_initial_s=0.1),
        )
        self.config.cluster.fileroot = str(folder / "runs")
        self.paths = RunPaths.of(self.config)
        self.paths.prepare()
        ServerKeys.make(self.paths.keys)
        self.keys = ServerKeys.read(self.paths.keys)

    async def __aenter__(self):
        journal = Journal(self.paths.events, 1, time.time)
        self.history = history_of(self.paths.events, 1, journal=journal)
        self.history.begin("the test")
        monitor = HealthMonitor(self.config, journal, self._ask, series=RewardSeries.read(self.paths))

        async def watch(servers, hold_s):
            monitor.watch(servers)
            return monitor.report()

        async def trust(name):
            monitor.trust(name)

        door = door_actor.DoorActor.__ray_metadata__.modified_class(self.config, self.paths, 1)
        self.processes = [self._server(index) for index in range(self.config.sglang.n_servers)]
        self.trainer = Stepping()
        self.fleet = FleetObserver(
            *(self.config, self.paths, self.history),
            servers={f"server-{index}": self._actor(one) for index, one in enumerate(self.processes)},
            monitor=Local(monitor, watch=watch, trust=trust),
            trainer=Local(door),
            memory=OomBackoff(self.config, self.history, None, on_gpu=False, shares_gpu=False),
        )
        self.monitor = monitor
        self.door = door
        self.address = (await door.addresses())[0]
        parts = (self.config, self.paths, self.history, self.trainer)
        coordinator = CommandCoordinator(*parts, changed=self.fleet.changed, fleet=self.fleet)
        self.serving = asyncio.create_task(coordinator.supervise())
        self.session = aiohttp.ClientSession()
        await self.until(lambda: len(self.ready()) == len(self.processes))
        return self

    def _server(self, index):
        spec = ServerSpec(
            index=index,
            config=self.config.sglang,
            log=self.paths.server_log(index),
            keys=self.paths.keys / SERVERS,
            setup_timeout_s=self.config.rollout.setup_timeout,
            entry=ENTRY,
            proof=ReadinessProof.of(self.config),
        )
        return SGLangProcess(spec, owners=(os.getpid(),))

    def _actor(self, process):
        async def start(*, overrides, **order):
            return await process.start(**order)

        return Local(process, start=start)

    async def _ask(self, name, work, hold_s):
        return await self.processes[int(name.rpartition("-")[2])].report(work, hold_s)

    async def __aexit__(self, *_):
        await self.session.close()
        self.trainer.done = "the command has ended"
        async with asyncio.timeout(scaled(60)):
            outcome = await self.serving
        assert (outcome.status, outcome.reason) == (TerminalStatus.FINISHED, self.trainer.done)
        await self.monitor.close()
        for process in self.processes:
            await process.stop()
        assert not list(self.paths.checkpoints.glob("kept_weights/*")), "nothing is left of the weights"

    def ready(self):
        return [one for one in self.fleet.trainer.view.servers if one.state == "READY"]

    def events(self, name):
        return [line for line in read_lines(self.paths.events) if line["event"] == name]

    async def until(self, holds):
        async with asyncio.timeout(scaled(90)):
            while not holds():
                assert not self.serving.done(), self.serving.result()
                await asyncio.sleep(0.02)

    async def post(self, path, body):
        """No error is ever seen."""
        async with self.session.post(f"http://{self.address}{path}", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer

    async def scores(self):
        """Of one completion by whichever server: its tokens and their log-probs, which tell the weights. The stand-in
        draws others where it continues what another has begun."""
        sampling = {"temperature": 0.0, "max_new_tokens": 30, "min_new_tokens": 30, "sampling_seed": 5}
        asked = {"input_ids": [19, 10, 20, 10], "sampling_params": sampling, "return_logprob": True}
        answer = await self.post("/generate", asked)
        return [(token, logprob) for logprob, token, _ in answer["meta_info"]["output_token_logprobs"]]


def test_what_the_commands_requests_wait_for():
    ready, dead = (
        ServerInfo(name="server-0", index=0, generation=0, state=state)
        for state in (ServerState.READY, ServerState.DEAD)
    )
    door = object.__new__(DoorHandle)

    def waits(**view):
        door.view = TrainerView(pid=1, **view)
        return door.waits_for()

    assert waits(servers=(dead, ready), phase="serve") == ""
    assert waits(servers=(dead,), phase="serve") == "a server"
    assert waits(servers=(), phase="serve") == "a server"
    assert waits(servers=(ready,), phase="publish") == "new weights"
    assert waits(servers=(ready,), phase="serve", busy="a disk refuses them") == "new weights"


def other_weights(folder):
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor * 1.3 for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def same(one, other):
    return all(a == b and abs(x - y) < 1e-3 for (a, x), (b, y) in zip(one, other, strict=True))


async def test_servers_that_are_killed_and_stopped_cost_no_error_and_no_weights(tmp_path, monkeypatch):
    async with Behind(tmp_path, monkeypatch, 1) as run:
        first = await run.scores()
        folder = other_weights(tmp_path / "update")
        await run.post("/pause_generation", {})
        assert (await run.post("/update_weights_from_disk", {"model_path": str(folder)}))["success"]
        shutil.rmtree(folder)
        await run.post("/continue_generation", {})
        second = await run.scores()
        assert not same(first, second)
        for number, signal_ in enumerate((signal.SIGKILL, signal.SIGSTOP)):
            asked = asyncio.create_task(run.scores())
            await asyncio.sleep(0.1)
            await run.until(run.ready)  # on a busy machine its silence may have made it suspect for a moment
            os.kill(run.ready()[0].pid, signal_)
            assert len(await asked) == 30, "nobody sees that it was cut"
            assert same(await run.scores(), second), "its replacement has the weights that the trainer has removed"
            await run.until(lambda number=number: len(run.events("incident.ended")) == number + 1)
        folder = other_weights(tmp_path / "update")
        (folder / "model.safetensors").write_bytes((MODEL / "model.safetensors").read_bytes())
        await run.until(run.ready)
        os.kill(run.ready()[0].pid, signal.SIGKILL)
        assert (await run.post("/update_weights_from_disk", {"model_path": str(folder)}))["success"]
        assert same(await run.scores(), first), "the update met a server that was gone"
        assert {one["cause"] for one in run.events("incident.ended")} <= {"server_crash", "server_hang"}
