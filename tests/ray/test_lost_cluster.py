"""Whatever ends Ray ends nothing: raylet, GCS and agents of a run's own cluster are killed, and the run goes on by
itself. Nor does a trainer that is killed too often. The second test resumes the run of the first.
"""

import pytest

from tests.programs.supervised_run import SupervisedRun

pytestmark = pytest.mark.timeout(900)

ENDLESS = 900
"""More steps than a run takes before it is ended."""
KILLS = {
    "raylet": "Ray's own process raylet ended (by SIGKILL)",
    "gcs_server": "Ray's own process gcs_server ended (by SIGKILL)",
    "ray::RuntimeEnvAgent": "Ray's own process raylet ended (its log: the agent runtime_env_agent failed)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def goes_on_without(run, title, seen):
    """Kill that process of Ray's, until the run trains in a cluster of its own again. `seen`: what is said of it."""
    run.wait_steps(run.steps_done() + 3)
    before, number = set(run.family()), len(run.incidents()) + 1
    run.kill(run.of_ray(title).pid)
    run.wait_until(lambda: len(run.events("incident.ended", "cluster")) == number, f"without {title}")
    assert {one.pid for one in before & set(run.family())} == {run.process.pid}, "nothing of the old one is left"
    began, ended = run.events("incident.began")[-1], run.events("incident.ended")[-1]
    assert began["reason"].startswith(seen), began["reason"]
    assert ended["reason"] == "training continues; no committed step was lost"
    assert "cluster: cluster.restarted" in ended["actions"][0]
    assert (run.paths.incident(number) / "raylet.log.tail").stat().st_size
    assert run.incidents()[number] == ("cluster_lost", "cluster", True)


def test_raylet_gcs_and_an_agent_are_killed_and_ctrl_c_while_a_new_cluster_starts_ends_it_as_it_should(folder):
    with SupervisedRun(folder, steps=ENDLESS, servers=2) as run:
        for title, seen in KILLS.items():
            goes_on_without(run, title, seen)
        assert len(run.events("run.started")) == 1 + len(KILLS)
        run.wait_steps(run.steps_done() + 1)
        run.kill(run.of_ray("raylet").pid)
        run.wait_until(lambda: len(run.events("incident.began", "cluster")) > len(KILLS), "it is seen")
        said = run.stop()
        run.wait_gone()
        assert "incident 1: the run's Ray cluster was lost (Ray's own process raylet ended (by SIGKILL)" in said
        (aborted,) = run.events("run.aborted")
        assert aborted["reason"].startswith("ended by the user")


def test_a_trainer_that_is_killed_too_often_costs_another_attempt_and_not_the_run(folder):
    done = SupervisedRun(folder, steps=ENDLESS, servers=2).steps_done()
    settings = ["recovery.standby_trainers=0", "restart.restore=0", "restart.attempt_wait_s=1"]
    with SupervisedRun(folder, steps=done + 5, servers=2, settings=settings) as run:
        run.wait_steps(done + 2)
        earlier, halts = run.incidents(), len(run.events("run.halting"))
        run.kill(run.trainer_pids()[-1])
        run.wait_until(lambda: len(run.events("run.halting")) > halts, "the run halts")
        assert run.events("run.halting")[halts]["may_pass"]
        said = run.finish()
        run.wait_gone()
        run.check_ledger()
        assert [line["global_step"] for line in run.ledger()] == list(range(done + 5)), "nothing was lost or repeated"
        (ended,) = run.events("incident.ended", "run")
        assert (ended["is_mended"], ended["reason"]) == (True, "training continues; no committed step was lost")
        both = [one for number, one in run.incidents().items() if number not in earlier]
        assert both == [("trainer_crash", "trainer", False), ("run_halted", "run", True)]
        assert "the run halted (trainer_crash of trainer again, without progress: restore 0 times" in said
        assert "a new attempt (1 of 6) begins in 1 s" in said
        assert run.events("run.errored") == []


@pytest.mark.long  # once lost without a new one, the run ends: tests/ray/test_supervised_run.py
def test_a_cluster_that_is_lost_again_and_again_ends_the_run_with_how_often(tmp_path):
    dashboard = "Ray's own process raylet ended (its log: the agent dashboard_agent failed)"
    with SupervisedRun(tmp_path, steps=ENDLESS, servers=1, settings=["restart.cluster=1"]) as run:
        goes_on_without(run, "ray::DashboardAgent", dashboard)
        run.wait_steps(run.steps_done() + 1)
        run.kill(run.of_ray("raylet").pid)
        run.wait_until(lambda: run.events("run.placed")[2:], "a new one runs")
        run.lose_ray("raylet")
        assert "; 1 new cluster brought no further step (restart.cluster)" in run.said()
