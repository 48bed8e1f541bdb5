"""The Coordinator and what it was repairing are killed together: its successor counts what was tried, no more."""

import pytest

from launcher.policy.actions import RestartTrainer, RestoreTrainer
from launcher.policy.observed import RunState
from tests.support.worlds.supervision import Trial, collapsed, restored_unheard


@pytest.mark.parametrize("kills", [1, 2])
async def test_a_restore_in_which_the_trainer_died_too_is_no_second_collapse_at_the_same_place(tmp_path, kills):
    """One such kill went further back than needed, two ended the run: "3 times: restoring does not help"."""
    trial = collapsed(await Trial(tmp_path).begun())
    for _ in range(kills):
        trial.hands.hangs.add(RestoreTrainer)
        await trial.turns(12)
        assert len(trial.did(RestoreTrainer)) == 1
        trial.run.kill_trainer()
        trial = Trial(tmp_path, trial.run)
        await trial.hands.begin()
    await trial.turns(60)
    assert [action.global_step for action in trial.did(RestoreTrainer)] == [19]
    assert trial.history.state is RunState.RUNNING


async def test_a_trainer_that_dies_later_leaves_the_restore_that_succeeded_in_the_count(tmp_path):
    """The Coordinator that ordered it was killed before it heard of the success."""
    after = await restored_unheard(tmp_path)
    await after.turns(6)
    after.run.step(2)
    after.run.kill_trainer()
    after.run.train(lineage=0)  # what takes its place is empty
    await after.turns()
    assert after.did(RestartTrainer)
    assert [one.restored_step for one in after.history.attempts if one.onset_step is not None] == [19]
