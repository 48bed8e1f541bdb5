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


def test_a_policy_that_collapses_goes_back_to_before_it_and_its_checkpoints_are_condemned(tmp_path):
    with SupervisedRun(tmp_path, steps=30, servers=1) as run:
        run.wait_steps(13)
        run.break_reward("zero_unless_known")
        first_false = run.steps_done()
        run.wait_until(lambda: run.events("health.reward_collapse"), "it is found")
        run.mend_reward()  # nothing is trained on before the restore: the gate is shut
        run.finish()
        run.check_ledger()
        assert run.incidents() == {1: ("reward_collapse", "policy", True)}
        assert not run.events("health.verifier_broken"), "known answers went on to be scored as they should be"
        first, restored = (event["global_step"] for event in run.events("trainer.restored"))
        assert (first, restored < first_false) == (-1, True)
        (condemned,) = run.events("checkpoint.condemned")
        assert condemned["incident"] == 1
        for name in condemned["checkpoints"]:
            assert list(run.paths.checkpoints.rglob(f"{name}/manifest.json")), "set aside, not deleted"
        standing = {step: (low, high) for step, low, high in rewards(run)}
        assert not any(pair == (0.0, 0.0) for step, pair in standing.items() if step > restored)


def test_batches_that_poison_the_numbers_are_dropped_and_twice_in_a_row_restores(tmp_path):
    with SupervisedRun(tmp_path, steps=16, servers=1) as run:
        run.wait_steps(9)
        run.break_reward("huge")
        run.wait_until(lambda: len(run.events("trainer.restoring")) == 2, "it is restored")
        run.mend_reward()
        run.finish()
        run.check_ledger()
        assert run.incidents() == {1: ("nonfinite", "trainer", True)}
        assert len(run.trainer_pids()) == 1
        first, restored = (event["global_step"] for event in run.events("trainer.restored"))
        assert first == -1
        assert restored >= 7, "no more than the step whose weights are suspected is taken back"
        assert all(abs(low) <= 1 and abs(high) <= 1 for _, low, high in rewards(run))
        assert len(run.events("incident.joined")) == len(run.events("batch.rejected")) >= 1
