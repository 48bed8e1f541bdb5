"""A whole run without processes: whatever befalls it, nothing is lost, doubled or stale at its end (P1, P2, P3, P9).

The last tests take a promise away from the project, and the simulated run shows it.
"""

import asyncio
import random

import pytest

from actors.training.step_records import StepRecords
from launcher.base.messages import Cause
from launcher.run_files.journal import read_lines
from launcher.run_log.step_line import DISTANCE
from tests.sim import scenarios
from tests.sim.scenarios import SCENARIOS
from tests.sim.sim_servers import OTHER_WEIGHTS, SimServer
from tests.sim.simulated_run import findings_of
from tests.support.mortal import Death

DRAWN = 4
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 30))]


@pytest.mark.parametrize("befalls", SCENARIOS, ids=lambda one: one.__name__)
def test_nothing_is_lost(simulator, tmp_path, befalls):
    run = simulator.live(tmp_path / "run", befalls)
    assert findings_of(run) == ()
    began = [line for line in read_lines(run.paths.events) if line["event"] == "incident.began"]
    is_harmless = befalls in (scenarios.nothing, scenarios.the_monitor_is_killed)
    assert bool(began) is not is_harmless, "what was meant to befall the run did"


@pytest.mark.parametrize("seed", SEEDS)
def test_nor_by_faults_that_are_drawn(simulator, tmp_path, seed):
    draw = random.Random(seed)

    async def befalls(run):
        for _ in range(DRAWN):
            await run.until(run.trainer.view.next_step + draw.randrange(1, 3))
            await asyncio.sleep(draw.random())
            for _ in range(draw.choice([1, 1, 2])):
                draw.choice(faults_of(run))()

    assert findings_of(simulator.live(tmp_path / "run", befalls)) == ()


def faults_of(run):
    servers = [fault for server in run.servers.values() for fault in (server.kill, server.hang)]
    return [*servers, run.trainer.kill, run.monitor.kill, run.coordinator.kill]


def test_of_rewards_that_a_broken_judge_gave_none_is_trained_on(simulator, tmp_path):
    run = simulator.live(tmp_path / "run", scenarios.the_judge_breaks)
    events = [line["event"] for line in read_lines(run.paths.events)]
    assert "canary.wrong" in events
    assert "canary.sound" in events
    rewards = [line["rollout/reward"] for line in read_lines(run.paths.metrics)]
    assert min(rewards) > 0


# ── it sees a breach ──


def test_a_line_that_is_never_made_up_for_is_seen(simulator, tmp_path, monkeypatch):
    monkeypatch.setattr(StepRecords, "complete", lambda records, report: None)
    death = Death(("trainer", "before the ledger's line"), 5)
    run = simulator.live(tmp_path / "run", death=death)
    assert death.has_come
    assert "steps never committed: [4]" in findings_of(run)


def test_prompts_of_a_rejected_batch_that_are_not_taken_again_are_seen(simulator, tmp_path, monkeypatch):
    monkeypatch.setattr("actors.data.prompt_queue.PromptQueue.requeue", lambda queue, ids: queue.commit(ids))
    run = simulator.live(tmp_path / "run", scenarios.the_judge_breaks)
    assert findings_of(run) != ()


def test_a_server_that_only_says_that_it_has_the_weights_makes_no_step(simulator, tmp_path, monkeypatch):
    """Its label is right and its weights are not: the gate must see it by their log-probs."""
    update = SimServer.take_weights

    def pretend(server, digest, version):
        update(server, server.digest if version == 4 and server.index == 0 else digest, version)

    monkeypatch.setattr(SimServer, "take_weights", pretend)
    run = simulator.live(tmp_path / "run")
    assert findings_of(run) == ()
    rejected = [line["cause"] for line in read_lines(run.paths.events) if line["event"] == "batch.rejected"]
    assert rejected == [Cause.SERVER_CORRUPT]
    assert max(line[DISTANCE] for line in read_lines(run.paths.metrics)) < OTHER_WEIGHTS / 100
