"""The monitor without Ray: it reads the run's own files, watches real processes, and answers at the gate."""

import asyncio
import dataclasses
import os
import signal

import pytest

from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.monitor_view import Watched
from actors.serving.server_processes import ServerProcesses
from actors.serving.sglang_client import SGLangClient
from launcher.base.messages import Cause, Health, ServerInfo, ServerState
from launcher.config.schema import RunConfig
from launcher.config.supervision import HealthConfig
from launcher.policy.admission import BatchReport
from launcher.policy.canary_policy import CanaryRound, CanaryScore
from launcher.run_files.journal import Journal, append_line, read_lines
from launcher.run_files.run_paths import RunPaths
from tests.programs import stand_in_server
from tests.unit.actors.monitoring.test_server_watch import DEADLINE_S, QUICK, fault, tree

SOUND = CanaryScore(name="right", expected=1.0, got=1.0)
WRONG = dataclasses.replace(SOUND, got=0.0)


class World:
    """A run's files, and monitors that read them."""

    def __init__(self, folder):
        self.paths = RunPaths(fileroot=folder, user="ann", experiment_name="exp", trial_name="t0")
        self.paths.prepare()
        self.config = RunConfig(experiment_name="exp", health=HealthConfig(**dataclasses.asdict(QUICK)))
        self.config.sglang.dtype = self.config.actor.dtype = "float32"
        self.journal = Journal(self.paths.events, attempt=1)

    def monitor(self):
        return HealthMonitor(self.config, self.paths, self.journal, SGLangClient())

    def step(self, step, reward=0.5, low=0.0, high=1.0, distance=1e-7):
        append_line(
            self.paths.metrics,
            {
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
            async with asyncio.timeout(DEADLINE_S):
                result = work(monitor)
                return await result if asyncio.iscoroutine(result) else result
        finally:
            await monitor.close()
            await monitor._client.close()

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


# ── the gate ──


def test_a_sound_run_is_admitted_step_by_step(world):
    def work(monitor):
        for step in range(40):
            assert monitor.admit(batch(step)).admitted
            world.step(step)
        return monitor.view()

    view = use(world, work)
    assert (view.incident, view.rejected_in_a_row) == (None, 0)
    assert list(read_lines(world.paths.events)) == []  # silence is the sound of health


@pytest.mark.parametrize("mean_reward", [0.4, 0.0])  # the second alone would look like a collapse
def test_s1_not_one_batch_passes_a_broken_verifier_and_it_is_named_at_once(world, mean_reward):
    world.steps(30)
    world.config.gate.max_reward_jump = 0.2

    def work(monitor):
        answers = [monitor.admit(batch(30, canaries=(SOUND, WRONG), mean_reward=mean_reward)) for _ in range(3)]
        return answers, monitor.view()

    answers, view = use(world, work)
    assert not any(answer.admitted for answer in answers)
    assert {(answer.cause, answer.subjects) for answer in answers} == {(Cause.VERIFIER_BROKEN, ("reward",))}
    assert (view.incident.cause, view.incident.onset_step) == (Cause.VERIFIER_BROKEN, 30)
    assert view.rejected_in_a_row == 3
    assert len(world.events("health.verifier_broken")) == len(world.events("canary.wrong")) == 1


def test_a_verifier_that_was_mended_is_believed_after_sound_rounds(world):
    world.steps(30)

    def work(monitor):
        assert not monitor.admit(batch(30, canaries=(WRONG,))).admitted
        answers = []
        for _ in range(world.config.reward_health.canary_clear_rounds):
            monitor.canaries(CanaryRound(step=30, scores=(SOUND,)))
            answers.append(monitor.view().incident is None)
        return answers, monitor.admit(batch(30)).admitted

    assert use(world, work) == ([False] * 4 + [True], True)
    assert len(world.events("health.mended")) == len(world.events("canary.sound")) == 1


def test_a_collapse_stops_the_steps_until_the_trainer_is_restored(world):
    world.steps(60)
    for step in range(60, 66):
        world.step(step, reward=0.0, high=0.0)

    def work(monitor):
        refused = monitor.admit(batch(66, mean_reward=0.0))
        incident = monitor.view().incident
        world.journal.record("trainer.loaded", subject="trainer", global_step=55)
        return refused, incident, monitor.view().incident, monitor.admit(batch(56))

    refused, incident, after, again = use(world, work)
    assert not refused.admitted
    assert incident.cause is Cause.REWARD_COLLAPSE
    assert abs(incident.onset_step - 60) <= 2
    assert after is None  # as soon as the journal says so, before a step is repeated
    assert again.admitted


def test_a_batch_for_an_earlier_step_takes_back_the_later_ones_though_no_event_says_so(world):
    world.steps(60)
    for step in range(60, 66):
        world.step(step, reward=0.0, high=0.0)
    assert use(world, lambda monitor: monitor.admit(batch(50))).admitted


def test_a_changed_reward_is_turned_away_twice_and_then_left_to_the_detectors(world):
    world.steps(30)

    def work(monitor):
        return [monitor.admit(batch(30, mean_reward=1.0, canaries=())).admitted for _ in range(4)]

    world.config.gate.max_reward_jump = 0.4
    assert use(world, work) == [False, False, True, False]


def test_tokens_of_another_model_make_the_servers_doubtful_until_they_are_probed(world, tmp_path):
    world.steps(30)

    async def work(monitor):
        monitor.watch([Watched(server=server(process.pid, "http://127.0.0.1:9"))])
        answer = monitor.admit(batch(30, logprob_distance=8.5e-4))
        doubts = [s.doubt for s in monitor.view().servers]
        monitor.trust("server-0")
        return answer, doubts, [s.doubt for s in monitor.view().servers]

    with tree(tmp_path) as process:
        answer, doubts, after = use(world, work)
    assert (answer.admitted, answer.cause) == (False, Cause.SERVER_STALE)
    assert doubts == [answer.reason]
    assert after == [""]


# ── after a restart ──


def test_a_successor_knows_from_the_files_what_its_predecessor_knew(world):
    world.steps(60)
    for step in range(60, 66):
        world.step(step, reward=0.0, high=0.0)
    first = use(world, lambda monitor: monitor.view())
    second = use(world, lambda monitor: (monitor._judge(), monitor.view())[1])
    assert first.rewards == second.rewards
    assert second.incident.onset_step == second.rewards.onset_step
    assert use(world, lambda monitor: monitor.admit(batch(66))).cause is Cause.REWARD_COLLAPSE


def test_a_successor_does_not_acquit_a_verifier_that_was_accused(world):
    world.steps(30)
    use(world, lambda monitor: monitor.admit(batch(30, canaries=(WRONG,))))
    answer = use(world, lambda monitor: monitor.admit(batch(30, canaries=(SOUND,))))
    assert answer.cause is Cause.VERIFIER_BROKEN
    assert len(world.events("canary.wrong")) == 1


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(world):
    world.steps(3)

    def work(monitor):
        with world.paths.metrics.open("a") as file:
            file.write('{"global_step": 3, "grpo_actor/task_reward/avg": 0.5, ')
            file.flush()
            torn = monitor.view().rewards.reason
            file.write('"grpo_actor/task_reward/min": 0, "grpo_actor/task_reward/max": 1}\n')
        return torn, monitor.view().rewards.reason

    torn, whole = use(world, work)
    assert "last 3 steps" in torn
    assert "last 4 steps" in whole


# ── servers ──


def server(pid, url, generation=0):
    return ServerInfo(
        name="server-0", index=0, generation=generation, state=ServerState.READY, url=url, pid=pid, weight_version=0
    )


async def until(monitor, targets, health):
    while (view := look(monitor, targets)).servers[0].verdict.health is not health:
        await asyncio.sleep(QUICK.look_interval_s)
    return view.servers[0]


def look(monitor, targets):
    monitor.watch(targets)
    return monitor.view()


def test_a_hang_is_seen_journaled_once_and_forgotten_with_the_next_life(world, tmp_path):
    async def work(monitor):
        first = [Watched(server=server(one.pid, url))]
        await until(monitor, first, Health.HEALTHY)
        await fault(url, kind="slow", times=None, seconds=600)
        os.kill(monitor.pids()["server-0"]["scheduler"], signal.SIGSTOP)
        dead = await until(monitor, first, Health.DEAD)
        await fault(url, kind="none")
        back = await until(monitor, [Watched(server=server(two.pid, url, generation=1))], Health.HEALTHY)
        return dead, back, look(monitor, [])

    running = stand_in_server.running("--weight-version", "0")
    with running as url, tree(tmp_path / "a") as one, tree(tmp_path / "b") as two:
        dead, back, none = use(world, work)
    assert (dead.generation, dead.verdict.cause) == (0, Cause.SERVER_HANG)
    assert back.generation == 1
    assert none.servers == ()
    assert len(world.events("health.dead")) == 1
    assert world.events("health.dead")[0]["at"] > 0


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), KeyError("a defect")])
def test_a_server_that_could_not_be_looked_at_once_is_looked_at_again(world, tmp_path, monkeypatch, error):
    """Its watch had ended unheard, and no hang of that life was ever seen."""
    look_at, fails = ServerProcesses.look, []

    def look_or_fail(tree):
        if fails:
            raise fails.pop()
        return look_at(tree)

    monkeypatch.setattr(ServerProcesses, "look", look_or_fail)

    async def work(monitor):
        targets = [Watched(server=server(process.pid, url))]
        await until(monitor, targets, Health.HEALTHY)
        monitor.admit(batch(0, weight_versions=(7,)))
        doubt = monitor.view().servers[0].doubt
        for _ in range(2):
            fails.append(error)
            while fails or not monitor._running["server-0"].done():
                await asyncio.sleep(QUICK.look_interval_s)
            await until(monitor, targets, Health.HEALTHY)
        await fault(url, kind="slow", times=None, seconds=600)
        os.kill(monitor.pids()["server-0"]["scheduler"], signal.SIGSTOP)
        return doubt, await until(monitor, targets, Health.DEAD)

    with stand_in_server.running("--weight-version", "0") as url, tree(tmp_path) as process:
        doubt, dead = use(world, work)
    assert dead.verdict.cause is Cause.SERVER_HANG
    assert doubt and dead.doubt == doubt  # it is the same life, with the same weights
    (told,) = world.events("health.blind")
    assert repr(error) in told["reason"]


def test_the_monitor_answers_while_a_server_hangs(world, tmp_path):
    """A blocked server costs its own probe alone: each question is answered within one turn of the loop."""

    async def work(monitor):
        monitor.watch([Watched(server=server(process.pid, url))])
        await fault(url, kind="slow", times=None, seconds=600)
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(0)
        return monitor.admit(batch(0)).admitted, monitor.view().servers[0].name

    with stand_in_server.running() as url, tree(tmp_path) as process:
        assert use(world, work) == (True, "server-0")
