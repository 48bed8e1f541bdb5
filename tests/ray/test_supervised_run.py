"""Who is killed, and what must go on: real driver, Coordinator and trainer, stand-in servers."""

import pytest

from launcher.memory_states import MemoryStates
from tests.supervised_run import SupervisedRun

pytestmark = pytest.mark.timeout(600)


def test_servers_and_supervisors_are_killed_and_the_trainer_is_not_touched(tmp_path):
    with SupervisedRun(tmp_path, steps=900, servers=2) as run:
        run.wait_until(lambda: len(run.server_pids()) == 2, "both serve")
        first = run.server_pids()
        run.kill(first["server-1"])
        run.wait_until(lambda: run.server_pids()["server-1"] != first["server-1"], "server-1 is replaced")
        second = run.server_pids()
        assert second["server-0"] == first["server-0"]

        steps = run.steps_done()
        run.kill(run.coordinator_pids()[-1])
        run.wait_until(lambda: run.events("coordinator.adopted"), "the Coordinator is back")
        run.wait_steps(steps + 2)
        run.kill(run.monitor_pids()[-1])
        run.wait_until(lambda: len(run.monitor_pids()) == 2, "the HealthMonitor is back")
        run.wait_steps(run.steps_done() + 2)
        assert run.server_pids() == second, "who watches may die without anybody else dying of it"

        run.kill(*second.values())
        run.wait_until(lambda: not set(run.server_pids().values()) & set(second.values()), "both are replaced")
        run.stop()
        run.check_ledger()
        assert len(run.trainer_pids()) == 1
        assert [line["global_step"] for line in run.ledger()] == list(range(run.steps)), "no step was taken twice"
        died = run.events("server.died")
        assert sorted(event["pid"] for event in died) == sorted([first["server-1"], *second.values()])


def test_a_killed_trainer_and_a_killed_driver_take_no_step_back(tmp_path):
    with SupervisedRun(tmp_path, steps=16, servers=1) as run:
        run.wait_steps(7)
        server = run.server_pids()
        run.kill(run.trainer_pids()[-1])
        run.wait_until(lambda: run.events("trainer.restarted"), "the trainer is back")
        run.wait_steps(10)
        assert run.server_pids() == server
        assert len(set(run.trainer_pids())) == 2
        run.kill(run.process.pid)
        run.process.wait()
    with SupervisedRun(tmp_path, steps=16, servers=1) as resumed:
        resumed.finish()
        resumed.check_ledger()
        assert [line["global_step"] for line in resumed.ledger()] == list(range(16)), "no step was taken back"
        first, second, third = (event["global_step"] for event in resumed.events("trainer.restored"))
        assert (first, second >= 6, third >= 9) == (-1, True, True)
        assert "taken back" not in resumed.paths.summary.read_text()
        assert not MemoryStates(resumed.paths).root.exists()


@pytest.mark.parametrize("vital", ["raylet", "gcs_server"])
def test_without_rays_own_processes_the_run_ends_in_a_word_and_leaves_nobody(tmp_path, vital):
    with SupervisedRun(tmp_path, steps=900, servers=1) as run:
        run.wait_steps(2)
        (process,) = [process for process in run.family() if process.name() == vital]
        process.kill()
        run.process.wait(60)
        assert run.process.returncode == 3, run.said()
        assert f"Ray's own process {vital} ended" in run.said()
        run.wait_gone()
