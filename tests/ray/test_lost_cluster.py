"""Whatever ends Ray ends nothing: raylet, GCS and agents of a run's own cluster are killed, and the run finishes. Nor
does a trainer that is killed too often."""

import pytest

from tests.programs.supervised_run import SupervisedRun

pytestmark = pytest.mark.timeout(900)

STEPS = 40
"""More than the run takes while it is broken four times, also where this test gets its turns late."""
KILLS = {
    "raylet": "Ray's own process raylet ended (by SIGKILL)",
    "gcs_server": "Ray's own process gcs_server ended (by SIGKILL)",
    "ray::RuntimeEnvAgent": "Ray's own process raylet ended (its log: the agent runtime_env_agent failed)",
    "ray::DashboardAgent": "Ray's own process raylet ended (its log: the agent dashboard_agent failed)",
}


def test_raylet_gcs_and_agents_are_killed_and_the_run_finishes_by_itself(tmp_path):
    with SupervisedRun(tmp_path, steps=STEPS, servers=2) as run:
        for number, (title, seen) in enumerate(KILLS.items(), start=1):
            run.wait_steps(run.steps_done() + 3)
            before = set(run.family())
            run.kill(run.of_ray(title).pid)
            run.wait_until(lambda n=number: len(run.events("incident.ended", "cluster")) == n, f"without {title}")
            assert {one.pid for one in before & set(run.family())} == {run.process.pid}, (
                "nothing of the old one is left"
            )
            began, ended = run.events("incident.began")[-1], run.events("incident.ended")[-1]
            assert began["reason"].startswith(seen), began["reason"]
            assert ended["reason"] == "training continues; no committed step was lost"
            assert ended["is_mended"]
            assert "cluster: cluster.restarted" in ended["actions"][0]
            assert (run.paths.incident(number) / "raylet.log.tail").stat().st_size
        said = run.finish()
        run.wait_gone()
        run.check_ledger()
        assert [line["global_step"] for line in run.ledger()] == list(range(STEPS)), "no step was taken twice"
        assert set(run.incidents().values()) == {("cluster_lost", "cluster", True)}
        assert len(run.events("run.started")) == 1 + len(KILLS)
        assert "4, all repaired: 4 cluster_lost" in said
        assert "incident 1: the run's Ray cluster was lost (Ray's own process raylet ended (by SIGKILL)" in said


def test_ctrl_c_while_a_new_cluster_starts_ends_the_run_as_it_should(tmp_path):
    with SupervisedRun(tmp_path, steps=900, servers=1) as run:
        run.wait_steps(2)
        run.kill(run.of_ray("raylet").pid)
        run.wait_until(lambda: run.events("incident.began", "cluster"), "it is seen")
        run.stop()
        run.wait_gone()
        (aborted,) = run.events("run.aborted")
        assert aborted["reason"].startswith("ended by the user")
    with SupervisedRun(tmp_path, steps=run.steps + 3, servers=1) as again:
        again.finish()
        again.check_ledger()
        assert [line["global_step"] for line in again.ledger()] == list(range(again.steps)), "nothing was lost"


def test_a_cluster_that_is_lost_again_and_again_ends_the_run_with_how_often(tmp_path):
    with SupervisedRun(tmp_path, steps=900, servers=1, settings=["restart.cluster=1"]) as run:
        run.wait_steps(2)
        run.kill(run.of_ray("raylet").pid)
        run.wait_until(lambda: run.events("run.placed")[1:], "a new one runs")
        run.lose_ray("raylet")
        assert "; 1 new cluster brought no further step (restart.cluster)" in run.said()


def test_a_trainer_that_is_killed_too_often_costs_another_attempt_and_not_the_run(tmp_path):
    settings = ["recovery.standby_trainers=0", "restart.restore=0", "restart.attempt_wait_s=1"]
    with SupervisedRun(tmp_path, steps=5, servers=1, settings=settings) as run:
        run.wait_steps(2)
        run.kill(run.trainer_pids()[-1])
        run.wait_until(lambda: run.events("run.halting"), "the run halts")
        assert run.events("run.halting")[-1]["may_pass"]
        said = run.finish()
        run.wait_gone()
        run.check_ledger()
        (ended,) = run.events("incident.ended", "run")
        assert (ended["is_mended"], ended["reason"]) == (True, "training continues; no committed step was lost")
        assert set(run.incidents().values()) == {("trainer_crash", "trainer", False), ("run_halted", "run", True)}
        assert "the run halted (trainer_crash of trainer again, without progress: restore 0 times" in said
        assert "a new attempt (1 of 6) begins in 1 s" in said
        assert run.events("run.errored") == []
