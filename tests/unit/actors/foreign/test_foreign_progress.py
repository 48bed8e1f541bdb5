"""When another project's trainer counts as hung: its steps, its checkpoints and its tree's CPU time."""

from pathlib import Path
from types import SimpleNamespace

from actors.foreign.foreign_process import TreeLook
from actors.foreign.foreign_progress import ProgressWatch, torn_in
from launcher.adapters.trainer_adapter import FoundCheckpoint
from launcher.base.messages import Cause, Health
from launcher.config.supervision import HealthConfig

SETTINGS = HealthConfig(trainer_min_s=60, trainer_factor=10, trainer_first_s=1800, trainer_silence_s=10)


class Game:
    """A tree, a clock, and looks at both."""

    def __init__(self):
        self.now = 0.0
        self.state = "S"
        self.cpu_s = 0.0
        self.changed = 0.0
        tree = SimpleNamespace(look_at_tree=lambda: TreeLook(state=self.state, cpu_s=self.cpu_s))
        self.waits_for = ""
        self.watch = ProgressWatch(SETTINGS, tree, self._checkpoints, lambda: self.now, lambda: self.waits_for)

    def _checkpoints(self):
        return [SimpleNamespace(step=1, is_whole=None, changed_at=self.changed)]

    def looks(self, seconds, *, steps, step_s=1.0, share=0.0, saves=False):
        """The last verdict, or the first of a death."""
        for _ in range(int(seconds / SETTINGS.look_interval_s)):
            self.now += SETTINGS.look_interval_s
            self.cpu_s += share * SETTINGS.look_interval_s
            self.changed = self.now if saves else self.changed
            verdict = self.watch.judge_progress(steps, step_s if steps else None)
            if verdict.health is Health.DEAD:
                break
        return verdict


def test_an_idle_tree_without_a_step_is_hung_after_its_own_measure():
    game = Game()
    game.looks(5, steps=1)
    assert game.looks(55, steps=1).health is not Health.DEAD
    verdict = game.looks(10, steps=1)
    assert (verdict.health, verdict.cause) == (Health.DEAD, Cause.TRAINER_HANG)


def test_who_waits_for_the_launchers_own_servers_is_not_hung_and_has_its_whole_time_after_it():
    game = Game()
    game.looks(5, steps=1)
    game.waits_for = "a server"
    verdict = game.looks(600, steps=1)
    assert verdict.health is not Health.DEAD
    game.waits_for = ""
    assert game.looks(55, steps=1).health is not Health.DEAD
    assert game.looks(10, steps=1).health is Health.DEAD


def test_slow_steps_have_a_longer_measure():
    game = Game()
    assert game.looks(290, steps=1, step_s=30).health is not Health.DEAD
    assert game.looks(20, steps=1, step_s=30).health is Health.DEAD


def test_a_busy_tree_has_the_patience_of_a_first_step():
    game = Game()
    assert game.looks(1700, steps=1, share=0.5).health is not Health.DEAD
    assert game.looks(200, steps=1, share=0.5).health is Health.DEAD


def test_a_checkpoint_that_is_written_is_progress():
    game = Game()
    assert game.looks(600, steps=1, saves=True).health is not Health.DEAD


def test_a_stopped_tree_is_hung_within_seconds():
    game = Game()
    game.looks(5, steps=1)
    game.state = "T"
    assert game.looks(9, steps=1).health is not Health.DEAD
    assert "stopped for" in game.looks(5, steps=1).reason


def test_a_busy_tree_that_never_reported_a_step_is_not_taken_down_and_is_told_of():
    game = Game()
    assert game.looks(1799, steps=0, share=0.5).health is not Health.DEAD
    assert game.watch.unseen == "", "a first step may take so long"
    assert game.looks(1200, steps=0, share=0.5).health is not Health.DEAD
    assert game.watch.unseen == "no step was seen in 2999 s"
    game.looks(1, steps=1)
    assert game.watch.unseen == ""


def test_a_checkpoint_without_a_step_is_told_of_and_one_that_was_there_before_is_not():
    game = Game()
    game.changed = 7.0
    game.looks(300, steps=0, share=0.5)
    assert game.watch.unseen == ""
    game.changed = 300.0
    game.looks(55, steps=0, share=0.5)
    assert game.watch.unseen == "", "its step may be reported after its checkpoint"
    game.looks(10, steps=0, share=0.5)
    assert game.watch.unseen == "no step was seen in 365 s, and it wrote a checkpoint 65 s ago"


def saved(step, is_whole, changed_at):
    problem = "" if is_whole else "state.json is not there yet"
    path = Path(f"out/step-{step}")
    return FoundCheckpoint(step=step, path=path, changed_at=changed_at, is_whole=is_whole, problem=problem)


def test_a_checkpoint_that_does_not_become_whole_is_told_of():
    torn, later = saved(5, False, 100.0), saved(10, False, 200.0)
    said = torn_in([torn, later], older_than=150.0)
    assert "step-5 is not whole" in said
    assert "state.json" in said
    assert "trainer.checkpoint_file" in said
    assert torn_in([torn, later], older_than=50.0) == "", "it may still be written"
    assert torn_in([torn], older_than=150.0) == "", "a save takes as long as it takes"
    assert torn_in([saved(5, True, 100.0), saved(7, None, 100.0), later], older_than=150.0) == ""
