"""A trainer's memory is taken away: the fault fires where it can, and is refused where it can't."""

import resource
import signal
from pathlib import Path

import pytest

from scripts.faults import memory_faults
from scripts.run_processes import find_run
from tests.support.fault_game import FaultGame, gone
from tests.support.worlds.faults import NEEDS_A_CGROUP


@pytest.fixture
def hungry(tmp_path):
    game = FaultGame(tmp_path, servers=1, step_mib=64)
    game.step()
    game.commit_checkpoint(0)
    handler = signal.getsignal(signal.SIGTERM)
    yield game
    signal.signal(signal.SIGTERM, handler)
    game.end()


@pytest.mark.slow
def test_t6_refuses_the_trainer_what_a_step_takes(hungry):
    trainer = find_run(hungry.paths).trainer
    others = find_run(hungry.paths).supervisors
    assert hungry.inject_while_it_steps("T6:share=0.5") == 0
    fired = hungry.fired()
    assert fired["pids"] == [trainer.pid]
    assert fired["proof"] == "OSError: [Errno 12] Cannot allocate memory"
    assert fired["step_bytes"] == pytest.approx(64 * 2**20, rel=0.1)
    assert fired["room_bytes"] == pytest.approx(32 * 2**20, rel=0.1)
    assert gone([trainer.pid])
    assert find_run(hungry.paths).supervisors == others


@pytest.mark.slow
def test_a_step_that_fits_under_the_limit_is_what_the_next_limit_is_of(tmp_path):
    """No two steps take the same: a limit of the largest may be none for all that follow."""
    game = FaultGame(tmp_path, servers=1, step_mib=64, limited_step_mib=32)
    try:
        game.step()
        game.commit_checkpoint(0)
        assert game.inject_while_it_steps("T6:share=0.6") == 0
        fired = game.fired()
        assert fired["proof"] == "OSError: [Errno 12] Cannot allocate memory"
        assert fired["step_bytes"] == pytest.approx(32 * 2**20, rel=0.1)
        assert fired["room_bytes"] == pytest.approx(0.6 * 32 * 2**20, rel=0.1)
    finally:
        game.end()


@pytest.mark.slow
@NEEDS_A_CGROUP
def test_t7_has_the_kernel_kill_the_trainer_alone_and_leaves_no_cgroup(hungry):
    found = find_run(hungry.paths)
    around = memory_faults.memory_cgroup(found.trainer)
    assert hungry.inject_while_it_steps("T7:share=0.5") == 0
    fired = hungry.fired()
    assert (fired["pids"], fired["proof"]) == (
        [found.trainer.pid],
        "the kernel killed it for memory (oom_kill 1)",
    )
    assert gone([found.trainer.pid])
    assert find_run(hungry.paths).supervisors == found.supervisors
    assert not list(around.glob("grpo-starved-*"))


@pytest.mark.slow
def test_a_trainer_that_finds_room_in_what_it_holds_is_left_alone(game):
    game.step()
    game.commit_checkpoint(0)
    trainer = find_run(game.paths).trainer
    before = resource.prlimit(trainer.pid, resource.RLIMIT_DATA)
    assert game.inject_while_it_steps("T6") == 1
    assert "MALLOC_MMAP_THRESHOLD_" in game.record()[-1]["reason"]
    assert find_run(game.paths).trainer == trainer
    assert resource.prlimit(trainer.pid, resource.RLIMIT_DATA) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["T6", pytest.param("T7", marks=NEEDS_A_CGROUP)])
def test_one_that_lives_on_under_its_limit_has_it_no_longer(hungry, kind):
    trainer = find_run(hungry.paths).trainer
    before = resource.prlimit(trainer.pid, resource.RLIMIT_DATA)
    assert hungry.inject_while_it_steps(f"{kind}:share=3,seconds=0.5") == 1
    assert "survived" in hungry.record()[-1]["reason"]
    assert find_run(hungry.paths).trainer == trainer
    assert resource.prlimit(trainer.pid, resource.RLIMIT_DATA) == before
    assert "grpo-starved" not in Path(f"/proc/{trainer.pid}/cgroup").read_text()


@pytest.mark.slow
def test_t6_and_t7_are_refused_where_they_can_not_work(hungry, monkeypatch, capsys):
    monkeypatch.setattr(memory_faults, "memory_folders_v1", lambda pid: iter(()))
    assert hungry.inject("T7") == 2
    assert "no memory cgroup of version 1" in capsys.readouterr().err
    monkeypatch.setattr(memory_faults, "GPU_FILES", "/dev/null")  # that the fake trainer holds open
    assert hungry.inject("T6") == 2
    assert "on a GPU" in capsys.readouterr().err
    assert hungry.record() == []
