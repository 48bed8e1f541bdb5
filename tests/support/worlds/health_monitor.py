"""A HealthMonitor with a clock, servers and batches of the test's own."""

import asyncio
import dataclasses
import time

import pytest

from actors.cluster.actor_calls import ActorAway
from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.reward_series import RewardSeries
from actors.serving.server_report import ServerReport, ServerWork
from launcher.base.messages import Health, ServerInfo, ServerState, Verdict
from launcher.config.schema import RunConfig
from launcher.config.supervision import HealthConfig
from launcher.policy.admission import BatchReport
from launcher.policy.canary_policy import CanaryScore
from launcher.run_files.journal import Journal, append_line, read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.worlds.server_watch import QUICK, deadline_s

SERVES = Verdict(health=Health.HEALTHY, reason="made a token 0.1 s ago")

SOUND = CanaryScore(name="right", expected=1.0, got=1.0)
WRONG = dataclasses.replace(SOUND, got=0.0)


class Server:
    """A server's actor: `asked` has the work of each question, and `tell` is a change that answers the one that it
    holds."""

    def __init__(self, verdict=SERVES, **facts):
        self.facts = {"verdict": verdict, "info": server(7, "http://127.0.0.1:9"), **facts}
        self.asked: list[ServerWork] = []
        self._changed = asyncio.Event()
        self._changed.set()

    def tell(self, **facts):
        self.facts |= facts
        self._changed.set()

    async def report(self, work):
        self.asked.append(work)
        await self._changed.wait()
        self._changed.clear()
        return ServerReport(ordered=work.generation, **self.facts)


class World:
    """A run's files, and monitors that read them."""

    def __init__(self, folder):
        self.paths = RunPaths(fileroot=folder, user="ann", experiment_name="exp", trial_name="t0")
        self.paths.prepare()
        self.config = RunConfig(experiment_name="exp", health=HealthConfig(**dataclasses.asdict(QUICK)))
        self.config.sglang.dtype = self.config.actor.dtype = "float32"
        self.journal = Journal(self.paths.events, attempt=1)
        self.servers: dict[str, Server] = {}

    def monitor(self):
        return HealthMonitor(self.config, self.journal, self.ask, series=RewardSeries.read(self.paths))

    async def ask(self, name, work, hold_s):
        """As the server's actor answers."""
        server = self.servers.get(name)
        if server is None:
            raise ActorAway(f"{name} can't be found")
        return await server.report(work)

    def step(self, step, reward=0.5, low=0.0, high=1.0, distance=1e-7):
        append_line(
            self.paths.metrics,
            {
                "time": time.time(),
                "global_step": step,
                "grpo_actor/task_reward/avg": reward,
                "grpo_actor/task_reward/min": low,
                "grpo_actor/task_reward/max": high,
                "grpo_actor/no_eos_ratios/avg": 0.05,
                "grpo_actor/logprob_distance/avg": distance,
            },
        )

    def steps(self, count, first=0):
        for step in range(first, first + count):
            self.step(step, reward=0.5 + 0.05 * (-1) ** step)

    def events(self, name):
        return [event for event in read_lines(self.paths.events) if event["event"] == name]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def use(world, work):
    """Run `work(monitor)` on a loop; the monitor ends with it."""

    async def inside():
        monitor = world.monitor()
        try:
            async with asyncio.timeout(deadline_s()):
                result = work(monitor)
                return await result if asyncio.iscoroutine(result) else result
        finally:
            await monitor.close()

    return asyncio.run(inside())


def batch(step, **change):
    given = {
        "policy_version": step,
        "weight_versions": (step,),
        "completions": 128,
        "without_reward": 0,
        "empty": 0,
        "nonfinite_logprobs": 0,
        "uneven_groups": 0,
        "global_step": step,
        "truncated": 6,
        "mean_reward": 0.5,
        "low_reward": 0.0,
        "high_reward": 1.0,
        "logprob_distance": 1e-7,
        "canaries": (SOUND,),
    }
    return BatchReport(**(given | change))


def server(pid, url, generation=0):
    return ServerInfo(
        name="server-0", index=0, generation=generation, state=ServerState.READY, url=url, pid=pid, weight_version=0
    )


async def watched(monitor, *names, generation=0):
    """These servers are watched from now on; returns when each has reported."""
    work = {name: ServerWork(generation=generation) for name in names or ("server-0",)}
    monitor.watch(work)
    while (seen := monitor.report().servers).keys() != work.keys():
        await asyncio.sleep(0)
    return seen
