"""What is learned goes wrong, not a process: real driver, Coordinator, monitor and trainer, stand-in servers."""

import itertools
import json
import os

import pytest

from tests.programs.supervised_run import BATCH, SupervisedRun
from tests.support.hot_optimizer import POISON

pytestmark = pytest.mark.timeout(600)

STEPS = 40
"""More than a run takes until it has been broken each time, also where this test gets its turns late."""
ENDLESS = 2000
"""For runs that are stopped once they have shown what they should."""


def rewards(run):
    """Of the steps that were committed, whether they stand or not: (step, lowest, highest)."""
    lines = [json.loads(line) for line in run.paths.metrics.read_text().splitlines()]
    return [(x["global_step"], x["grpo_actor/task_reward/min"], x["grpo_actor/task_reward/max"]) for x in lines]


def test_a_reward_function_that_breaks_and_is_mended_costs_no_step(tmp_path):
    ways = ("zero", "one", "raise")
    found_at = []
    with SupervisedRun(tmp_path, steps=STEPS, servers=1, settings=["reward_health.canary_clear_rounds=2"]) as run:
        for number, do in enumerate(ways, 1):
            run.wait_steps(run.steps_done() + 4)
            run.break_reward(do)
            run.wait_until(lambda n=number: len(run.incidents()) == n, f"{do}: it is found")
            found_at.append(run.steps_done())
            if do != "raise":  # then no batch comes to be, and the trainer waits for the first
                run.wait_until(lambda n=number: len(run.events("trainer.paused")) == n, f"{do}: the trainer waits")
            if do == "zero":  # whoever takes the monitor's place says the same, and nobody that it is over
                run.kill(run.monitor_pids()[-1])
                run.wait_until(lambda: len(run.events("health.verifier_broken")) == 2, "its successor accuses it too")
            run.mend_reward()
            run.wait_until(lambda n=number: run.incidents()[n][2], f"{do}: it is over")
        said = run.finish()
        run.check_ledger()
        assert run.incidents() == dict.fromkeys((1, 2, 3), ("verifier_broken", "reward", True))
        assert len(run.trainer_pids()) == 1, "the trainer is not restarted for it"
        assert [step for step, low, high in rewards(run)] == list(range(STEPS)), "no step was taken back"
        began = run.events("incident.began")
        assert all(at <= event["onset_step"] + 1 for at, event in zip(found_at, began, strict=True))
        for number, do in enumerate(ways, 1):
            assert f"incident {number}: the reward function is broken" in said
            assert f"incident {number} is over after" in said
            folder = run.paths.incident(number)
            assert json.loads((folder / "incident.json").read_text())["is_mended"] is True
            if do != "raise":
                batches = [json.loads(path.read_text()) for path in folder.glob("batch-*.json")]
                false = {rollout["reward"] for group in batches[0]["groups"] for rollout in group["rollouts"]}
                assert false <= {0.0, 1.0}
        rejected = run.events("batch.rejected")
        assert {e["rejection"] for e in run.events("incident.joined")} == {e["rejection"] for e in rejected}


def known_completions(file):
    """Of the user, without a number: answers as those of a judge of texts."""
    good = [{"question": f"{n}?", "answer": f"sun {n}", "completion": f"sun {n}", "good": True} for n in range(4)]
    bad = [line | {"completion": f"#### rain of {line['question']}", "good": False} for line in good]
    file.write_text("".join(json.dumps(line) + "\n" for line in (*good, *bad)))
    return file


def test_rewards_and_weights_that_are_no_numbers_and_a_policy_that_collapses(tmp_path):
    """The user's known completions tell the two judges that break from the policy that does."""
    # Without the run's own record, a function that fails new completions alone passes for a policy that collapses.
    poison, known = tmp_path / "poison", known_completions(tmp_path / "known.jsonl")
    optimizer = "actor.optimizer.type=tests.support.hot_optimizer:PoisonedAdamW"
    settings = [f"reward.canaries={known}", "gate.recorded=0", optimizer]
    with SupervisedRun(
        tmp_path, steps=ENDLESS, servers=1, settings=settings, environment=os.environ | {POISON: str(poison)}
    ) as run:
        run.wait_steps(4)
        run.break_reward("huge")
        run.wait_until(lambda: run.events("run.paused"), "it waits")
        run.mend_reward()
        run.wait_until(lambda: run.incidents() == {1: ("verifier_broken", "reward", True)}, "it is over")
        assert any("have no finite advantages" in event["reason"] for event in run.events("batch.rejected"))

        run.wait_steps(run.steps_done() + 4)
        wrong = len(run.events("canary.wrong"))
        run.break_reward("one")
        run.wait_until(lambda: len(run.incidents()) == 2, "the judge is named")
        run.mend_reward()
        run.wait_until(lambda: run.incidents().get(2) == ("verifier_broken", "reward", True), "it is over")
        assert "bad completion known.jsonl:" in run.events("canary.wrong")[wrong]["reason"]
        assert len(run.events("trainer.restored")) == 1, "the weights had no part in either"

        run.wait_steps(run.steps_done() + 4)
        sound = run.steps_done() - 1
        poison.touch()
        run.wait_until(lambda: run.incidents().get(3) == ("nonfinite", "trainer", True), "the weights are taken back")
        first, restored = (event["global_step"] for event in run.events("trainer.restored"))
        assert first == -1
        assert restored >= sound - 1, "no more than the step whose weights are suspected is taken back"

        run.wait_steps(run.steps_done() + 8)
        accused = run.events("health.verifier_broken")
        run.break_reward("zero_unless_known")
        first_false = run.steps_done()
        run.wait_until(lambda: run.events("health.reward_collapse"), "it is found")
        run.mend_reward()  # nothing is trained on before the restore: the gate is shut
        run.wait_until(lambda: run.incidents().get(4) == ("reward_collapse", "policy", True), "it is over")
        run.wait_steps(run.steps_done() + 3)
        run.stop()
        run.check_ledger()
        assert len(run.incidents()) == 4
        assert run.events("health.verifier_broken") == accused, "known answers went on to be scored as they should be"
        restored = run.events("trainer.restored")[-1]["global_step"]
        assert restored < first_false
        (condemned,) = (event for event in run.events("checkpoint.condemned") if event["incident"] == 4)
        for name in condemned["checkpoints"]:
            assert list(run.paths.checkpoints.rglob(f"{name}/manifest.json")), "set aside, not deleted"
        standing = {step: (low, high) for step, low, high in rewards(run)}  # one of zeros alone may be chance
        zeros = [standing[step] == (0.0, 0.0) for step in sorted(standing) if step > restored]
        assert (True, True) not in itertools.pairwise(zeros)
        assert all(abs(low) <= 1 and abs(high) <= 1 for _, low, high in rewards(run))
        assert len(run.trainer_pids()) == 1


def test_with_dynamic_sampling_a_collapse_is_found_though_its_groups_are_left_out(tmp_path):
    settings = ["actor.dynamic_sampling=3", "gate.recorded=0"]
    with SupervisedRun(tmp_path, steps=ENDLESS, servers=2, settings=settings) as run:
        run.wait_steps(9)
        run.break_reward("zero_unless_known")
        run.wait_until(lambda: run.events("health.reward_collapse"), "it is found")
        run.mend_reward()
        run.wait_until(lambda: run.incidents() == {1: ("reward_collapse", "policy", True)}, "it is over")
        run.kill(*run.server_pids().values(), run.trainer_pids()[-1])
        run.wait_steps(run.steps_done() + 4)
        run.stop()
        run.check_ledger()
        lines = run.ledger()
        assert sum("filtered_ids" in line for line in lines) > len(lines) / 2, "half of the groups have no signal"
        assert max(len(line["prompt_ids"]) for line in lines) == BATCH
        assert max(len(line["prompt_ids"]) + len(line.get("filtered_ids", ())) for line in lines) == 3 * BATCH
