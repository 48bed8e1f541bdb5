"""The promises P1 to P12 (docs/design.md) over faults that are drawn, several in one run.

After each run the project's own auditor reads the files (P2), and what was done is compared with what was true
(tests/sim/truth.py). The rest of this file takes each promise away from the project, and shows that this is seen.
"""

import asyncio
import dataclasses
import random

import pytest

from actors.monitoring.health_monitor import HealthMonitor
from actors.supervision.action_executor import ActionExecutor
from actors.supervision.coordinator import Coordinator
from actors.training.admission_gate import AdmissionGate
from actors.training.step_records import StepRecords
from launcher.base.disk_faults import DiskFault
from launcher.base.messages import Cause, Health, TerminalStatus
from launcher.config.schema import RunConfig
from launcher.policy import incident_policy, plan
from launcher.policy.actions import RestartTrainer
from launcher.policy.admission import Admission
from launcher.policy.checkpoint_status import CheckpointStatus, JudgedCheckpoint
from launcher.policy.plan import PlanBuilder, reconcile_trainer
from launcher.run_files.run_memory import RunMemory
from tests.sim import scenarios
from tests.sim.sim_servers import SimServer
from tests.sim.simulated_run import findings_of, settings
from tests.support.mortal import Death

DRAWN = 5
TIERS = {range(4): [], range(4, 12): [pytest.mark.slow], range(12, 30): [pytest.mark.long]}
SEEDS = [pytest.param(seed, marks=marks) for seeds, marks in TIERS.items() for seed in seeds]
ADMITTED = Admission(admitted=True, reason="planted")


@pytest.mark.parametrize("seed", SEEDS)
def test_no_promise_is_broken_by_faults_that_are_drawn(simulator, tmp_path, seed):
    draw = random.Random(seed)

    async def befalls(run):
        for _ in range(DRAWN):
            await run.until(run.trainer.view.next_step + draw.randrange(1, 3))
            await asyncio.sleep(draw.random())
            for _ in range(draw.choice([1, 1, 2])):
                await draw.choice(faults_of(run))()

    assert findings_of(simulator.live(tmp_path / "run", befalls)) == ()


def faults_of(run):
    servers = [fault for server in run.servers.values() for fault in (server.kill, server.hang)]
    at_once = [*servers, run.trainer.kill, run.monitor.kill, run.coordinator.kill]
    disks = [lambda disk=disk: a_full_disk(disk) for disk in (run.disks.of_the_run, run.disks.of_checkpoints)]
    return [*(as_coroutine(one) for one in at_once), lambda: a_broken_judge(run), lambda: a_lie(run), *disks]


def as_coroutine(fault):
    async def one():
        fault()

    return one


async def a_broken_judge(run):
    run.break_judge()
    await asyncio.sleep(20.0)
    run.mend_judge()


async def a_full_disk(disk):
    disk.fail(DiskFault.FULL)
    await asyncio.sleep(20.0)
    disk.mend()


async def a_lie(run):
    run.servers["server-0"].lies_at = run.trainer.view.next_step + 1


def test_supervision_is_as_every_user_has_it(tmp_path):
    """P10"""
    config, usual = settings(tmp_path, 4), RunConfig()
    for part in ("gate", "health", "reward_health", "restart", "restore", "recovery", "disk", "memory"):
        assert getattr(config, part) == getattr(usual, part)


# ── a breach of each is seen ──


def promises_broken(run, ends=TerminalStatus.FINISHED):
    return {finding.split(":")[0] for finding in findings_of(run, ends)}


def test_p1_what_other_weights_made(simulator, tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.policy.admission._distant", lambda *_: [])
    assert "P1" in promises_broken(simulator.live(tmp_path / "run", scenarios.a_server_says_that_it_has_the_weights))


def test_p1_rewards_of_a_broken_judge(simulator, tmp_path, monkeypatch):
    monkeypatch.setattr(HealthMonitor, "admit", lambda monitor, report: ADMITTED)
    assert "P1" in promises_broken(simulator.live(tmp_path / "run", scenarios.the_judge_breaks))


def test_p2_a_line_that_is_never_made_up_for(simulator, tmp_path, monkeypatch):
    monkeypatch.setattr(StepRecords, "complete", lambda records, report: None)
    death = Death(("trainer", "before the ledger's line"), 5)
    run = simulator.live(tmp_path / "run", death=death)
    assert death.has_come
    assert "steps never committed: [4]" in findings_of(run)


def test_p2_prompts_of_a_rejected_batch_that_are_not_taken_again(simulator, tmp_path, monkeypatch):
    monkeypatch.setattr("actors.data.prompt_queue.PromptQueue.requeue", lambda queue, ids: queue.commit(ids))
    assert findings_of(simulator.live(tmp_path / "run", scenarios.the_judge_breaks)) != ()


def test_p2_a_step_beyond_the_one_whose_line_the_disk_refuses(simulator, tmp_path, monkeypatch):
    write = StepRecords.write
    monkeypatch.setattr(StepRecords, "write", lambda records, report: write(records, report) and None)
    assert "P2" in promises_broken(simulator.live(tmp_path / "run", scenarios.the_disk_of_the_run_is_full))


def test_p3_a_server_that_gets_a_label_and_no_weights(simulator, tmp_path, monkeypatch):
    update = SimServer.take_weights

    def pretend(server, digest, version):
        update(server, server.digest if version == 4 and server.index == 0 else digest, version)

    monkeypatch.setattr(SimServer, "take_weights", pretend)
    assert "P3" in promises_broken(simulator.live(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("without", [("onset",), ("certificate",), ("onset", "certificate")], ids="-and-".join)
def test_p4_damage_is_restored_without_onset_and_certificate(simulator, tmp_path, monkeypatch, without):
    """Each of the two alone saves this run."""
    if "onset" in without:
        monkeypatch.setattr("launcher.policy.restore.first_damaged", lambda incident: 10**6)
    if "certificate" in without:
        good = JudgedCheckpoint(status=CheckpointStatus.GOOD, reason="")
        monkeypatch.setattr("launcher.checkpoints.checkpoint_catalog.checkpoint_status", lambda *_, **__: good)
    monkeypatch.setattr(ActionExecutor, "_condemn", condemns_nothing)
    run = simulator.live(tmp_path / "run", scenarios.the_policy_rots, epochs=scenarios.LONG)
    assert any(finding.startswith("P4") for finding in run.truth.breaches) is (len(without) == 2)


async def condemns_nothing(executor, after_step, reason):
    pass


def test_p5_a_trainer_that_is_restarted_for_a_server(simulator, tmp_path, monkeypatch):
    def with_each_server(builder):
        is_lost = any(server.verdict.health is Health.DEAD for server in builder.seen.servers)
        if is_lost and not builder.does(RestartTrainer):
            builder.order(RestartTrainer(reason="planted"))
        else:
            reconcile_trainer(builder)

    monkeypatch.setattr("launcher.policy.plan.reconcile_trainer", with_each_server)
    assert "P5" in promises_broken(simulator.live(tmp_path / "run", scenarios.a_server_is_killed))


def test_p5_repairs_that_meet_the_same_full_disk(simulator, tmp_path, monkeypatch):
    waits = plan._wait_for_disk

    def and_repairs(seen, disk, config, now):
        made, again = waits(seen, disk, config, now), RestartTrainer(reason="planted")
        is_due = seen.trainer.verdict.health is Health.DEAD and again not in seen.under_way
        return dataclasses.replace(made, actions=(*made.actions, again)) if is_due else made

    monkeypatch.setattr(plan, "_wait_for_disk", and_repairs)
    assert "P5" in promises_broken(simulator.live(tmp_path / "run", scenarios.all_die_while_the_disk_is_full))


def test_p6_a_successor_that_knows_nothing(simulator, tmp_path, monkeypatch):
    async def forgetful(config, file, attempt, events):
        return RunMemory(attempt=attempt)

    monkeypatch.setattr("tests.sim.sim_supervisors.take_place", forgetful)
    run = simulator.live(tmp_path / "run", scenarios.the_coordinator_is_killed)
    assert any(finding.startswith("P6") for finding in run.truth.breaches)


def test_p6_a_repair_that_is_ordered_while_it_is_under_way(simulator, tmp_path, monkeypatch):
    monkeypatch.setattr(PlanBuilder, "does", lambda plan, kind, name="": any(isinstance(a, kind) for a in plan.actions))
    run = simulator.live(tmp_path / "run", scenarios.a_server_is_killed)
    assert any(finding.startswith("P6") for finding in run.truth.breaches)


def test_p7_a_gate_that_does_not_wait(simulator, tmp_path, monkeypatch):
    monkeypatch.setattr(AdmissionGate, "admit", lambda gate, batch, stats: ADMITTED)
    assert "P7" in promises_broken(simulator.live(tmp_path / "run"))


def test_p8_servers_that_nobody_stops(simulator, tmp_path, monkeypatch):
    async def only_ends(executor, word, reinstate_after):
        executor._is_stopped = True

    monkeypatch.setattr(ActionExecutor, "_halt", only_ends)
    assert "P8" in promises_broken(simulator.live(tmp_path / "run"))


def test_p9_an_end_without_a_reason(simulator, tmp_path, monkeypatch):
    outcome = Coordinator._outcome
    monkeypatch.setattr(Coordinator, "_outcome", lambda *all_: dataclasses.replace(outcome(*all_), reason=""))
    assert "P9" in promises_broken(simulator.live(tmp_path / "run"))


def test_p11_another_cause_than_was_seen(simulator, tmp_path, monkeypatch):
    found = incident_policy._of_servers
    monkeypatch.setattr(
        incident_policy,
        "_of_servers",
        lambda seen: [dataclasses.replace(one, cause=Cause.GPU_FAULT) for one in found(seen)],
    )
    assert "P11" in promises_broken(simulator.live(tmp_path / "run", scenarios.a_server_is_killed))


@pytest.mark.slow
def test_p12_a_restore_whose_outcome_nobody_looks_at(simulator, tmp_path, monkeypatch):
    monkeypatch.setattr("actors.monitoring.reward_series.restore_contradicted", lambda *_, **__: "")
    run = simulator.live(tmp_path / "run", scenarios.the_template_changes, epochs=scenarios.LONG)
    assert "P12" in promises_broken(run, TerminalStatus.ERRORED)
