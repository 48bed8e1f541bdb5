"""While the HealthMonitor is away nothing is known of the learning: no incident is over, and none is forgotten (P7)."""

import pytest

from launcher.base.messages import Cause, Incident
from launcher.policy.actions import PauseTrainer, RestartTrainer, RestoreTrainer, ResumeTrainer
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus
from tests.support.worlds.supervision import Trial, collapsed


async def paused_for_the_verifier(folder):
    trial = await Trial(folder).begun()
    trial.run.step(3)
    trial.run.incident = Incident(
        cause=Cause.VERIFIER_BROKEN, subject="reward", reason="scored 0, not 1", since=trial.run.now, onset_step=3
    )
    await trial.turns(3)
    assert trial.did() == [PauseTrainer(reason="scored 0, not 1", save=True)]
    trial.hands.done.clear()
    return trial


@pytest.mark.parametrize("is_successor", [False, True])
async def test_a_pause_for_a_broken_reward_function_lasts_while_the_monitor_is_away(tmp_path, is_successor):
    """The trainer was resumed, and the incident told as over, each time the monitor was killed during such a pause."""
    trial = await paused_for_the_verifier(tmp_path)
    known, trial.run.incident, trial.run.is_judged = trial.run.incident, None, False
    if is_successor:
        trial = Trial(tmp_path, trial.run)
        await trial.hands.begin()
    await trial.turns(5)
    assert (trial.did(), trial.events("incident.ended")) == ([], [])
    trial.run.incident, trial.run.is_judged = known, True
    await trial.turns(3)
    assert (trial.did(), len(trial.events("incident.began"))) == ([], 1)
    trial.run.incident = None
    await trial.turns(3)
    assert trial.did() == [ResumeTrainer()]
    assert [event["is_mended"] for event in trial.events("incident.ended")] == [True]


async def test_a_trainer_that_died_in_a_collapse_does_not_load_the_damage_while_the_monitor_is_away(tmp_path):
    trial = collapsed(await Trial(tmp_path).begun())
    known, trial.run.incident, trial.run.is_judged = trial.run.incident, None, False
    trial.run.kill_trainer()
    await trial.turns(5)
    assert [type(action) for action in trial.did()] == [RestartTrainer]
    trial.run.incident, trial.run.is_judged = known, True
    await trial.turns()
    assert [action.global_step for action in trial.did(RestoreTrainer)] == [19]


async def test_a_trainer_that_died_while_all_was_well_is_loaded_when_the_monitor_answers(tmp_path):
    trial = await Trial(tmp_path).begun()
    trial.run.step(9)
    trial.run.checkpoints = (CheckpointFacts(global_step=8, status=CheckpointStatus.CANDIDATE),)
    trial.run.is_judged = False
    trial.run.kill_trainer()
    await trial.turns(5)
    trial.run.is_judged = True
    await trial.turns()
    assert [action.global_step for action in trial.did(RestoreTrainer)] == [8]
    assert trial.did(ResumeTrainer)
