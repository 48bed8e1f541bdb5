"""What is learned goes wrong, not a process: real driver, Coordinator, monitor and trainer, stand-in servers."""

import json

import pytest

from tests.supervised_run import SupervisedRun

pytestmark = pytest.mark.timeout(600)


def rewards(run):
    """Of the steps that were committed, whether they stand or not: (step, lowest, highest)."""
    lines = [json.loads(line) for line in run.paths.metrics.read_text().splitlines()]
    return [(x["global_step"], x["grpo_actor/task_reward/min"], x["grpo_actor/task_reward/max"]) for x in lines]


@pytest.mark.parametrize("do", ["zero", "one", "raise"])
def test_a_reward_function_that_breaks_and_is_mended_costs_no_step(tmp_path, do):
    with SupervisedRun(tmp_path, steps=14, servers=1) as run:
        run.wait_steps(4)
        run.break_reward(do)
        run.wait_until(lambda: run.events("incident.began", "reward"), "it is found")
        found_at = run.steps_done()
        run.wait_until(lambda: run.events("trainer.paused") or do == "raise", "the trainer waits")
        run.mend_reward()
        said = run.finish()
        run.check_ledger()
        assert run.incidents() == {1: ("verifier_broken", "reward", True)}
        assert len(run.trainer_pids()) == 1, "the trainer is not restarted for it"
        (began,) = run.events("incident.began")
        assert [step for step, low, high in rewards(run)] == list(range(14)), "no step was taken back"
        assert found_at <= began["onset_step"] + 1
        assert "incident 1: the reward function is broken" in said
        assert "incident 1 is over after" in said
        folder = run.paths.incident(1)
        assert json.loads((folder / "incident.json").read_text())["is_mended"] is True
        if do != "raise":  # then no batch came to be
            batches = [json.loads(path.read_text()) for path in folder.glob("batch-*.json")]
            false = {rollout["reward"] for group in batches[0]["groups"] for rollout in group["rollouts"]}
            assert false <= {0.0, 1.0}
            rejected = run.events("batch.rejected")
            assert {e["rejection"] for e in run.events("incident.joined")} == {e["rejection"] for e in rejected}
