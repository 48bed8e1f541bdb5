"""The step loop call by call: what it asks of model, gate, servers and disk, in which order, and where one fails."""

import contextlib
import threading
from types import SimpleNamespace

import pytest

from actors.rollout.rollout_engine import Stopped
from actors.training.run_position import RunPosition
from launcher.base.disk_faults import DiskFault, Refusal
from launcher.base.errors import RolloutError, TrainerError
from launcher.base.messages import Cause, EvalReport
from launcher.policy.admission import Admission
from tests.unit.actors.training.scripted_loop import ADMITTED, FINE, ScriptedLoop

SPOILT = SimpleNamespace(finite=False, problems=("loss is nan",), is_of_rewards=False)
REFUSED = Admission(admitted=False, reason="the monitor says no")
FULL = Refusal(path="/disk", fault=DiskFault.QUOTA, at=0.0)
EVALS = (EvalReport(policy_version=1, prompts=1, sampled=0.5, greedy=0.5),)
STEP = ["collect", "step", "weights", "publish", "keep"]


@pytest.fixture
def scene(tmp_path, monkeypatch):
    return lambda **given: ScriptedLoop(tmp_path, monkeypatch, **given)


def test_a_run_call_by_call(scene):
    now = scene(save_at={2}, evaluate_at={2})
    assert now.loop.run()
    assert now.log == [
        *("evaluate 0", "conclude", *STEP),
        *("conclude", *STEP, "conclude", "save 2", "evaluate 2"),
        *("conclude", *STEP, "evaluate 3"),
        *("conclude", "save 3", "conclude, required"),
    ]
    a_step = ["rollout", "train", "checkpoint", "train", "publish"]
    assert now.phases == [
        "evaluate",
        *a_step,
        *a_step,
        "checkpoint",
        "evaluate",
        *a_step,
        "evaluate",
        "checkpoint",
        "idle",
    ]
    assert now.ends == [False, False, True]
    assert [event["global_step"] for event in now.event("eval.done")] == [-1, 1, 2]
    last = now.reports[-1]
    assert (last.global_step, last.epoch, last.epoch_step, last.policy_version) == (2, 0, 2, 3)
    assert (last.attempt, last.time, last.weight_versions) == (7, 50.0, (2,))
    assert (last.rollouts_failed, last.rollouts_retried, last.prompt_ids) == (3, 4, ("p004", "p005"))
    assert last.metrics == {
        "rollout/reward": 0.5,
        "timeperf/rollout_s": 1.0,
        "timeperf/train_s": 2.0,
        "timeperf/publish_s": 16.0,
        "timeperf/step_s": 1.0 + 2.0 + 16.0 + 8.0,
        "timeperf/save_s": 8.0,
    }
    now.loop.forget()
    assert now.log[-1] == "forget 3"


def test_one_that_has_evaluated_its_last_weights_does_not_again(scene):
    now = scene(steps=1, evaluate_at={1})
    assert now.loop.run()
    assert now.log.count("evaluate 1") == 1
    again = scene(steps=2)
    again.loop.restore(now.loop._position)
    again.policy_version = 1
    assert again.loop.run()
    assert "evaluate 0" not in again.log


def test_a_source_that_evaluates_nothing_leaves_no_report(scene):
    now = scene(steps=1)
    now.then[""] = [lambda: None] * 2
    assert now.loop.run()
    assert now.loop.evals == []


@pytest.mark.parametrize(
    ("steps", "epochs", "filtered", "total"), [(None, 2, 0, 6), (4, 2, 0, 4), (9, 1, 0, 3), (None, 1, 1, 2)]
)
def test_there_are_as_many_steps_as_epochs_have_at_most(scene, steps, epochs, filtered, total):
    """Fewer where a step uses up more prompts than it trains on."""
    now = scene(steps=steps, epochs=epochs, filtered=filtered)
    assert now.loop.total_steps == (3 if filtered else total)
    assert now.loop.run()
    assert now.log.count("publish") == now.loop.next_step == now.loop.total_steps == total


@pytest.mark.parametrize("save", [True, False])
def test_a_stop_finishes_its_step_and_saves_where_it_is_asked_to(scene, save):
    now = scene()
    now.then["admit"] = [ADMITTED, lambda: now.loop.request_stop(save=save) or ADMITTED]
    assert not now.loop.run()
    assert now.loop.next_step == 2
    assert ("save 2" in now.log) is save
    assert "conclude, required" not in now.log
    assert now.phases[-1] == "idle"
    assert not now.loop.run(), "it may not go on"
    now.loop.allow()
    now.log.clear()
    now.then["collect"] = [Stopped()]
    assert not now.loop.run()
    assert now.log[-3:] == ["conclude", "save 2", "conclude"], "an earlier stop's wish is forgotten"
    assert now.loop.run()
    assert now.loop.next_step == 3


def test_a_run_that_is_at_its_end_saves_whatever_a_stop_wanted(scene):
    now = scene(steps=1)
    now.then["admit"] = [lambda: now.loop.request_stop(save=False) or ADMITTED]
    assert now.loop.run()
    assert "save 1" in now.log


@pytest.mark.parametrize("where", ["collect", "admit"])
def test_a_stop_within_a_step_gives_its_prompts_back_first(scene, where):
    now = scene(steps=2)
    now.then[where] = [Stopped()]
    assert not now.loop.run()
    assert now.log.count("discard") == (where == "admit")
    assert "save 0" in now.log
    assert now.loop.run()
    assert [report.prompt_ids for report in now.reports] == [("p000", "p001"), ("p002", "p003")]


def test_lines_that_the_disk_refused_stop_the_loop_and_their_checkpoint_is_owed(scene):
    now = scene(save_at={1})
    now.then["record"] = [FULL]
    assert not now.loop.run()
    assert (now.loop.refusal, now.loop.next_step, now.is_due) == (FULL, 1, True)
    assert not [name for name in now.log if name.startswith("save")]
    now.loop.allow()
    now.log.clear()
    assert now.loop.run()
    assert now.log[:3] == ["conclude", "save 1", "conclude"]
    assert now.is_due is False
    assert now.loop.next_step == 3


def test_lines_of_the_last_step_that_the_disk_refused_leave_the_run_unfinished(scene):
    now = scene(steps=1)
    now.then["record"] = [FULL]
    assert not now.loop.run()
    assert now.steps() == ["evaluate 0", *STEP]


def test_what_a_disk_refused_meanwhile_is_not_forgotten_for_lines_that_it_took(scene):
    now = scene()
    now.then["publish"] = [lambda: setattr(now.loop, "refusal", FULL)]
    assert not now.loop.run()
    assert now.loop.next_step == 1


def test_a_checkpoint_that_the_disk_refused_is_met_before_the_next_step_and_not_while_it_is_written(scene):
    now = scene()
    now.then["conclude"] = [FULL]
    assert not now.loop.run()
    assert now.log == ["evaluate 0", "conclude", "conclude"]
    writing = scene(steps=1)
    writing.is_saving = True
    assert writing.loop.run()
    assert writing.log[: 1 + len(STEP)] == ["evaluate 0", *STEP]


def test_a_last_checkpoint_that_the_disk_refused_leaves_the_run_unfinished(scene):
    now = scene(steps=1)
    now.then["conclude, required"] = [FULL]
    assert not now.loop.run()
    assert now.loop.refusal is FULL


def test_what_a_disk_refused_while_the_gradient_was_made_is_met_before_the_weights_change(scene):
    now = scene()
    now.then["wait"] = [lambda: setattr(now.loop, "refusal", FULL)]
    assert not now.loop.run()
    assert now.steps() == ["evaluate 0", "collect", "discard"]
    assert now.loop.refusal is FULL


@pytest.mark.parametrize(("by", "discards"), [("check", 0), ("admit", 1)])
def test_a_batch_that_the_gate_refuses_goes_back_to_the_end(scene, by, discards):
    now = scene(steps=1)
    now.then[by] = [REFUSED]
    assert now.loop.run()
    assert now.steps()[:-3] == ["evaluate 0", "collect", *["discard"] * discards, "rejected", *STEP]
    assert now.reports[0].prompt_ids == ("p002", "p003")
    assert [event["reason"] for event in now.event("batch.rejected")] == ["the monitor says no"]
    assert now.loop.rejections.since_step == (), "a step was committed since"


def test_what_was_made_ahead_of_a_refused_batch_is_taken_anew(scene):
    now = scene(steps=1)
    now.then["check"] = [lambda: now.queue.take_prompts(1) and REFUSED]
    assert now.loop.run()
    assert now.reports[0].prompt_ids == ("p002", "p003")
    assert now.queue.in_flight == ()


@pytest.mark.parametrize("end", [Stopped(), RolloutError("no server")])
def test_who_waits_for_a_checkpoint_that_is_being_written_says_so_whatever_ended_the_step(scene, end):
    """A pause that came in the middle of a long one left the trainer in the phase of a rollout, in which it passed for
    hung after some steps' time, and was killed."""
    now, seen = scene(), []
    now.is_saving = True

    def ends():
        now.loop.request_stop(save=False)
        raise end

    now.then["collect"] = [ends]
    now.then |= {name: [lambda: seen.append(now.phases[-1])] * 2 for name in ("conclude", "settle")}
    with contextlib.suppress(RolloutError):
        assert not now.loop.run()
    assert seen
    assert set(seen) == {"checkpoint"}


def test_after_a_stop_a_batch_whose_rewards_were_at_fault_is_scored_again_first(scene):
    now = scene(steps=1)
    now.then["check"] = [Admission(admitted=False, reason="all are 0", cause=Cause.VERIFIER_BROKEN)]
    now.then["collect"] = [None, Stopped()]
    assert not now.loop.run()
    assert now.loop.run()
    assert now.reports[0].prompt_ids == ("p000", "p001")


@pytest.mark.parametrize("where", ["gradients", "step"])
def test_numbers_that_are_not_finite_cost_one_batch_and_two_in_a_row_the_run(scene, where):
    now = scene()
    now.then[where] = [SPOILT]
    assert now.loop.run()
    assert now.log.count("discard") == now.log.count("rejected") == 1
    now = scene()
    now.then[where] = [SPOILT, SPOILT]
    with pytest.raises(TrainerError, match="step 0: numbers that are not finite: loss is nan"):
        now.loop.run()
    assert now.log[-1] == "conclude"
    assert not [name for name in now.log if name.startswith(("save", "publish"))]


@pytest.mark.parametrize("between", ["a step", "a refusal", "a restore"])
def test_what_is_in_between_ends_the_row(scene, between):
    now = scene()
    now.then["gradients"] = [SPOILT, FINE, SPOILT]
    if between == "a refusal":
        now.then["admit"] = [REFUSED]
    if between == "a restore":
        now.then["gradients"] = [SPOILT, Stopped(), SPOILT]
        assert not now.loop.run()
        now.loop.restore(RunPosition())
    assert now.loop.run()
    assert now.loop.next_step == 3


def test_weights_that_are_not_finite_are_never_sent(scene):
    now = scene()
    now.then["weights"] = [lambda: setattr(now, "is_sound", False)]
    with pytest.raises(TrainerError, match=r"step 0: .* the weights after the optimizer's step"):
        now.loop.run()
    assert now.steps() == ["evaluate 0", "collect", "step", "weights"]


def test_a_step_whose_weights_reach_nobody_was_taken_and_is_saved(scene):
    now = scene()
    now.then["publish"] = [RolloutError("no server")]
    with pytest.raises(RolloutError):
        now.loop.run()
    assert now.steps() == ["evaluate 0", *STEP, "settle", "discard", "save 1"]
    assert now.loop.next_step == 1
    assert "conclude, required" not in now.log


@pytest.mark.parametrize("where", ["step", "weights"])
def test_within_a_step_nothing_is_saved(scene, where):
    now = scene()
    now.then[where] = [MemoryError()]
    with pytest.raises(MemoryError):
        now.loop.run()
    assert now.steps()[-1] == "settle"
    now.loop.restore(RunPosition())
    now.then["collect"] = [RolloutError("no server")]
    with pytest.raises(RolloutError):
        now.loop.run()
    assert now.steps()[-1] == "save 0", "a restore ends it"


@pytest.mark.parametrize("spoilt", [False, True])
def test_before_a_step_and_after_one_that_was_not_taken_it_is_saved(scene, spoilt):
    now = scene()
    now.then["step"] = [SPOILT] * spoilt
    now.then["collect"] = [None] * spoilt + [RolloutError("no server")]
    with pytest.raises(RolloutError):
        now.loop.run()
    assert now.steps()[-1] == "save 0"


def test_unsound_weights_are_not_saved_and_an_error_in_saving_hides_none(scene):
    now = scene()
    now.is_sound = False
    now.then["collect"] = [RolloutError("no server")]
    with pytest.raises(RolloutError):
        now.loop.run()
    assert now.steps()[-1] == "discard"
    now = scene()
    now.then |= {"collect": [RolloutError("no server")], "save 0": [MemoryError("no memory")]}
    with pytest.raises(RolloutError):
        now.loop.run()
    (failed,) = now.event("checkpoint.failed")
    assert (failed["reason"], failed["global_step"]) == ("MemoryError: no memory", -1)


def test_a_restored_loop_does_first_what_was_due_after_its_last_step(scene):
    now = scene(steps=3)
    now.loop.request_stop()
    now.is_due = now.evaluation_is_due = True
    now.loop.restore(RunPosition(next_step=2, epoch=1, evals=EVALS))
    assert now.loop.evals == [*EVALS]
    assert not now.loop.run()
    assert now.steps() == ["save 2", "evaluate 0", "save 2"]
    assert not now.loop.run()
    assert now.steps()[3:] == ["save 2"], "once"


def test_a_report_says_how_many_restores_the_run_has_behind_it(scene):
    """It was added when the lines were written: a state in memory was without it, and so were the lines that a kill
    had kept back."""
    now = scene(steps=1)
    now.loop.restore(RunPosition(), 4)
    assert now.loop.run()
    assert now.reports[0].metrics_line()["lineage"] == 4


@pytest.mark.parametrize(("next_step", "known"), [(0, 1), (2, 0)])
def test_a_restored_loop_does_not_begin_with_an_evaluation(scene, next_step, known):
    """But for one at its beginning that has none."""
    now = scene(steps=3)
    now.loop.rejections.since_step = ("one",)
    now.loop.restore(RunPosition(next_step=next_step, evals=EVALS[:known]))
    assert now.loop.rejections.since_step == ()
    assert now.loop.run()
    assert now.steps()[: len(STEP)] == STEP


def test_weights_change_under_both_locks_and_another_s_lock_is_taken(scene):
    lock = threading.RLock()
    now = scene(steps=1, lock=lock)
    assert now.loop.weights_lock is lock
    seen = []
    now.then["weights"] = [lambda: seen.append((is_free(lock), is_free(now.loop.view_lock)))]
    now.then["step"] = [lambda: seen.append((is_free(lock), is_free(now.loop.view_lock))) or FINE]
    assert now.loop.run()
    assert seen == [(False, True), (False, False)]
    with scene().loop.changing():
        pass


def is_free(lock):
    """To another thread."""
    found = []

    def tries():
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=tries)
    thread.start()
    thread.join()
    return found[0]
