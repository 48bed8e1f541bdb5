"""The injector against real processes: each fault is proven to have fired, and to have hit nobody else."""

import os
import signal

import pytest

from actors.processes.process_tree import identify, wait_ended
from launcher.checkpoints.checkpoint_store import CheckpointStore
from scripts.faults import trainer_faults
from scripts.inject_fault import main
from scripts.run_processes import find_run, state
from tests.support.fault_game import deadline_s, gone

# ── signals ──


@pytest.mark.slow
@pytest.mark.parametrize("part", ["scheduler", "http", "detokenizer", "tree"])
def test_c1_ends_the_part_that_is_named_and_no_other_server(game, part):
    game.step()
    first, second = find_run(game.paths).servers
    meant = [process.pid for process in first.part(part)]
    assert game.inject(f"C1:part={part},server=0") == 0
    fired = game.fired()
    assert (fired["target"], fired["part"], sorted(fired["pids"])) == ("server-0", part, sorted(meant))
    assert gone(meant)
    assert all(identify(process.pid) == process for process in second.tree)
    assert fired["began_monotonic"] <= fired["monotonic"]


@pytest.mark.slow
def test_c7_ends_every_server_and_leaves_the_trainer(game):
    game.step()
    before = find_run(game.paths)
    assert game.inject("C7") == 0
    assert sorted(game.fired()["pids"]) == sorted(p.pid for server in before.servers for p in server.tree)
    assert gone(game.fired()["pids"])
    assert find_run(game.paths).trainer == before.trainer


@pytest.mark.slow
def test_c2_stops_for_good_or_for_a_time(game):
    game.step()
    (scheduler,) = find_run(game.paths).servers[1].part("scheduler")
    assert game.inject("C2:part=scheduler,server=1") == 0
    assert game.fired()["pids"] == [scheduler.pid]
    assert state(scheduler) == "T"
    os.kill(scheduler.pid, signal.SIGCONT)
    game.step()
    assert game.inject("C2:part=http,server=0,seconds=0.1") == 0
    assert state(find_run(game.paths).servers[0].http) in "SR"


@pytest.mark.slow
def test_t1_needs_a_complete_checkpoint_or_to_be_told(game, capsys):
    game.step()
    trainer = find_run(game.paths).trainer
    assert game.inject("T1") == 2
    assert "no complete checkpoint" in capsys.readouterr().out
    assert identify(trainer.pid) == trainer
    assert game.inject("T1", "--even-the-last") == 0
    assert game.fired()["pids"] == [trainer.pid]
    assert gone([trainer.pid])


@pytest.mark.slow
def test_t1_at_a_save_kills_while_the_folder_is_staged(game, monkeypatch):
    """The folder is there all the time from before the step on: only one that appears meanwhile counts."""
    game.step()
    game.commit_checkpoint(0)
    old = game.paths.default_checkpoints / ".staging-old"
    old.mkdir()
    looks, names = [], trainer_faults._names

    def looked(folder, begin):
        looks.append(names(folder, begin))
        if len(looks) == 3:  # the first is what was there before; by the second nothing has come
            (folder / ".staging-new").mkdir()
        return looks[-1]

    monkeypatch.setattr(trainer_faults, "_names", looked)
    assert main(["T1:moment=save", "--fileroot", str(game.folder), "--within", str(deadline_s())]) == 0
    assert game.fired()["proof"] == ".staging-new was there"
    assert gone(game.fired()["pids"])


@pytest.mark.slow
def test_a_moment_that_does_not_come_is_missed_and_the_trainer_resumes(game, monkeypatch):
    monkeypatch.setattr(trainer_faults, "DUMP_TIMEOUT_S", 60.0)  # on a busy machine a dump takes longer
    game.step()
    game.commit_checkpoint(0)
    trainer = find_run(game.paths).trainer
    assert game.inject("T1:moment=backward") == 1
    assert [line["what"] for line in game.record()] == ["begun", "missed"]
    assert "'backward' did not come" in game.record()[-1]["reason"]
    assert state(trainer) in "SR"


@pytest.mark.slow
@pytest.mark.parametrize("who", ["health_monitor", "coordinator"])
def test_m1_ends_the_supervisor_that_is_named(game, who):
    game.step()
    meant = find_run(game.paths).supervisors[who]
    assert game.inject(f"M1:who={who}") == 0
    assert game.fired()["pids"] == [meant.pid]
    assert set(find_run(game.paths).supervisors) == {"health_monitor", "coordinator"} - {who}


@pytest.mark.slow
def test_m2_ends_the_driver_and_what_was_to_follow_is_missed(game):
    game.step()
    game.commit_checkpoint(0)
    servers = find_run(game.paths).servers
    assert game.inject("M2", "C1") == 1
    assert gone([game.driver.pid])
    whats = [(line["kind"], line["what"]) for line in game.record()]
    assert whats[:2] == [("M2", "begun"), ("M2", "fired")]
    assert whats[2] == ("C1", "missed")
    assert wait_ended([p for server in servers for p in server.tree], deadline_s())


# ── checkpoints and disks ──


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["torn", "flip", "manifest"])
def test_t4_damages_the_newest_and_keeps_the_last_complete_one(game, damage):
    game.step()
    game.commit_checkpoint(0)
    store = CheckpointStore(game.paths.default_checkpoints)
    assert game.inject(f"T4:damage={damage},then=nothing") == 2
    assert store.latest_complete().checkpoint.global_step == 0
    game.commit_checkpoint(1)
    assert game.inject(f"T4:damage={damage},then=nothing") == 0
    assert store.latest_complete().checkpoint.global_step == 0
    assert game.inject(f"T4:damage={damage},then=nothing") == 2
    assert find_run(game.paths).trainer is not None


@pytest.mark.slow
def test_t4_continues_with_t1(game):
    game.step()
    trainer = find_run(game.paths).trainer
    for step in (0, 1):
        game.commit_checkpoint(step)
    assert game.inject("T4") == 0
    assert game.fired()["pids"] == [trainer.pid]
    assert gone([trainer.pid])


@pytest.mark.slow
def test_t5_never_fills_the_machine_s_own_disk(game, capsys):
    game.step()
    game.commit_checkpoint(0)
    assert game.inject("T5") == 2
    assert "mount -t tmpfs" in capsys.readouterr().err
