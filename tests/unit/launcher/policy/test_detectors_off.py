"""Each detector left out or switched off: the fault that it is there for goes unnoticed.

Those that switch theirs off beside the fault itself are named in tests/traps.md.
"""

import asyncio
import math

import pytest

from actors.processes.background_tasks import BackgroundTasks
from actors.supervision.server_handle import ServerHandle
from actors.weights.weight_consistency_check import GoldenComparison, golden_distance
from launcher.base.errors import TrainerError, WeightsRefused
from launcher.base.messages import Cause, Health, ServerState
from launcher.base.rollouts import Completion
from launcher.checkpoints import checkpoint_store
from launcher.config.supervision import HealthConfig
from launcher.policy import admission, exit_cause
from launcher.policy.admission import admit
from launcher.policy.exit_cause import find_server_cause, find_trainer_cause
from tests.support.replay import Replay, prompts
from tests.support.worlds.checkpoints import flip_one_bit, save, truncate
from tests.support.worlds.policy import EXACT, changed
from tests.support.worlds.policy import LIMIT_S as TRAINER_LIMIT_S
from tests.support.worlds.policy import watch as watch_trainer
from tests.support.worlds.supervision import WEIGHTS, handle
from tests.support.worlds.training import N_PROMPTS, SAMPLES, Trial, poison

# ── death watch ──


async def hear_of_a_death(monkeypatch=None):
    if monkeypatch is not None:
        monkeypatch.setattr(ServerHandle, "_take_end", lambda self, end: None)
    slot, actor, died = handle()
    await slot.start(0, WEIGHTS, {})
    actor.end("ended by itself")
    actor.tell(slot)
    return len(died), slot.ordered


async def test_without_taking_its_end_a_death_is_not_told(monkeypatch):
    assert await hear_of_a_death() == (1, ServerState.DEAD)
    assert await hear_of_a_death(monkeypatch) == (0, ServerState.READY)


async def test_an_end_that_was_ordered_is_no_death():
    slot, actor, died = handle()
    await slot.start(0, WEIGHTS, {})
    actor.end("told to stop", was_told=True)
    await slot.stop()
    assert (died, slot.ordered) == ([], ServerState.STOPPED)


# ── the gate's certain rules, which no setting switches off ──


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("_wrong_weights", {"weight_versions": (6,)}),
        ("_incomplete", {"nonfinite_logprobs": 2}),
        ("_incomplete", {"without_reward": 1}),
        ("_incomplete", {"empty": 1}),
        ("_incomplete", {"uneven_groups": 1}),
    ],
)
def test_without_a_certain_rule_its_batch_would_be_trained_on(monkeypatch, rule, change):
    assert not admit(changed(**change), EXACT).admitted
    monkeypatch.setattr(admission, rule, lambda *args: [])
    assert admit(changed(**change), EXACT).admitted


# ── non-finite numbers ──


def test_without_the_look_at_the_gradient_the_step_would_be_tried(tmp_path, monkeypatch):
    """What vetoes first is left out; the model's own refusal to commit is the second, and would end the loop."""
    overflow = poison(1, logprobs=-1e38)
    monkeypatch.setattr("actors.training.step_loop.GrpoLoop._is_finite", lambda self, stats, batch: True)
    trial = Trial(tmp_path, steps=3, rollouts=Replay(prompts(N_PROMPTS), SAMPLES, spoil=overflow))
    with pytest.raises(TrainerError, match="must not be committed"):
        trial.run()


def test_a_large_gradient_that_is_finite_is_clipped_and_stepped(tmp_path):
    ratio = poison(1, logprobs=-30.0)  # e^26 before the clip
    trial = Trial(tmp_path, steps=3, rollouts=Replay(prompts(N_PROMPTS), SAMPLES, spoil=ratio))
    assert trial.run()
    assert trial.events("batch.rejected") == []
    assert all(tensor.isfinite().all() for tensor in trial.weights().values())


# ── the trainer's hang ──


def test_without_patience_that_ends_a_hung_trainer_would_be_waited_for(monkeypatch):
    faults = ({"stopped": True}, {"mute": True, "idle": True}, {"idle": True})
    until = 30 + TRAINER_LIMIT_S + 5
    assert all(Health.DEAD in watch_trainer(until, **fault) for fault in faults)
    for_ever = HealthConfig(trainer_min_s=1e6, trainer_silence_s=1e6)
    monkeypatch.setattr("tests.support.worlds.policy.SETTINGS", for_ever)
    assert not any(Health.DEAD in watch_trainer(until, **fault) for fault in faults)


@pytest.mark.parametrize(
    ("words", "find", "line", "named", "unnamed"),
    [
        ("OF_A_SERVER", find_server_cause, "torch.OutOfMemoryError: CUDA", Cause.SERVER_OOM, Cause.SERVER_CRASH),
        ("OF_THE_TRAINER", find_trainer_cause, "MemoryError", Cause.TRAINER_OOM, Cause.TRAINER_CRASH),
    ],
)
def test_without_its_words_running_out_of_memory_is_a_crash_like_any_other(
    monkeypatch, words, find, line, named, unnamed
):
    """And would be met by the same settings again."""
    assert find([line], 1).cause is named
    monkeypatch.setattr(exit_cause, words, ())
    found = find([line], 1)
    assert (found.cause, found.ran_out) == (unnamed, None)


# ── checkpoints ──


@pytest.mark.parametrize("damage", [flip_one_bit, truncate])
def test_without_verification_a_damaged_checkpoint_would_be_the_newest(tmp_path, monkeypatch, damage):
    store = checkpoint_store.CheckpointStore(tmp_path / "default")
    save(store, 6)
    damage(save(store, 7).path)
    assert store.latest_complete().checkpoint.global_step == 6
    monkeypatch.setattr(checkpoint_store, "verify_checkpoint", lambda path: ())
    assert store.latest_complete().checkpoint.global_step == 7


# ── the golden probe ──


async def test_without_a_limit_other_weights_would_get_traffic():
    answer = Completion(token_ids=(5, 6), logprobs=(-1.0, -2.0), weight_version=3, finish_reason="length")

    async def generate():
        return answer

    async def compare(_):
        return GoldenComparison(version=3, distance=0.5)

    async def probe(limit):
        how = {"limit": limit, "name": "server-0", "settled": lambda: 3, "within_s": 60.0}
        return await golden_distance(generate, compare, **how)

    with pytest.raises(WeightsRefused):
        await probe(1e-5)
    assert await probe(math.inf) == 0.5


# ── tasks that watch ──


async def test_without_raising_it_the_death_of_a_watching_task_would_pass_unseen(monkeypatch):
    monkeypatch.setattr(BackgroundTasks, "check", lambda tasks: None)

    async def defect():
        raise KeyError("a defect")

    tasks = BackgroundTasks()
    tasks.start(defect())
    for _ in range(5):
        await asyncio.sleep(0)
    tasks.check()
    monkeypatch.undo()
    with pytest.raises(KeyError, match="a defect"):
        tasks.check()
