"""Two trainer ranks, each a real process, against one: the same figures, gradients, weights and files.

The tolerance is that of the arithmetic. What each token contributes is computed alike; the sums are not taken in the
same order, so a gradient of n terms may differ by n roundings of its largest one. In float32 a rounding is 2^-24 of
it, a batch here has about 70 tokens, each of which passes two layers forward and backward: 1.7e-5 of the largest entry
is allowed (measured: up to 2e-6, and 1.4e-5 for GSPO, whose sequences' terms cancel). Where terms cancel more than
that, one rank differs from itself as much when its batch is cut into other micro-batches (2.3e-5 with a KL term on one
processor, where two ranks were 2.4e-5 from it, and 1.7e-6 from the other cut): what it does is allowed on top. Each
step begins with the same weights and moments on both, since how fast roundings grow from step to step has no bound.
AdamW divides by the root of the second moment, so a relative difference of a gradient is one of its step: the mean
weight may be off by 1e-5 of what weights moved, and none by a hundredth of a step, which is for entries near 0
(measured: 2e-6, and a five-hundredth). In bfloat16 a rounding is off by up to 2^-8, and a matrix product of another
number of rows may round elsewhere. A gradient has passed 8 rounded products in each of 2 layers, forward and backward:
32 independent roundings, each uniform within 2^-8, on either side of the comparison. Three standard deviations of
their difference are allowed, 5.4e-2 of the largest entry (measured: 0.7e-2 on one processor, 2.3e-2 on another; a
rank's share left out would be 50e-2). Means over all tokens average most of that out: 2e-2.
"""

import dataclasses
import functools
import math
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError
from safetensors.torch import load_file

from actors.model import stored_tensors
from actors.model.micro_batches import SampledSequence, deal
from actors.model.policy_model import PolicyModel
from actors.model.rank_collectives import MeetingPlace, RankGroup, interface_of
from actors.model.stored_tensors import TensorRows, overwrite_tensors
from actors.ranks.rank_controller import said
from actors.weights.weight_folders import WeightFolders
from launcher.base.errors import CheckpointError, ConfigError, TrainerError
from launcher.checkpoints.checkpoint_store import CheckpointName, CheckpointStore
from launcher.checkpoints.manifest import ADAPTER_FILE, FACTS_FILE, TENSORS_FILE, WEIGHTS_FILE
from launcher.config.recipe import AdvNormConfig
from launcher.config.schema import MicroBatchConfig, OptimizerConfig
from tests.support.rank_pair import ADDRESS, Pair
from tests.support.rank_pair import gradients as gradients_of
from tests.support.tiny_models import actor, make_groups, make_model, policy, reference, state_of, weights
from tests.support.worlds.model import share_out

TEMPERATURE = 0.8
STEPS = 3
LR = 1e-2  # of tiny_models.actor
FLOAT32 = 1e-5
FLOAT32_GRADIENT = 70 * 2 * 2 * 2**-24
BFLOAT16 = 2e-2
ROUNDINGS = 2 * 8 * 2
BFLOAT16_GRADIENT = 3 * math.sqrt(2 * ROUNDINGS / 3) * 2**-8

CLIPPED = OptimizerConfig(lr=LR, warmup_steps=2, lr_scheduler_type="cosine", weight_decay=0.1, gradient_clipping=0.3)
CUT_SMALL = MicroBatchConfig(max_tokens_per_mb=24)
GSPO = {"importance_sampling_level": "sequence", "loss_aggregation": "sequence_mean", "eps_clip": 0.9}
VARIANTS = {
    "token mean": {},
    "sequence mean, in small micro-batches": {"loss_aggregation": "sequence_mean", "mb_spec": CUT_SMALL},
    "KL to a reference": {"kl_loss_coef": 0.3},
    "old log-probs from the trainer, layers computed twice": {
        "recompute_logprob": True,
        "gradient_checkpointing": True,
    },
    "GSPO, in small micro-batches": {**GSPO, "mb_spec": CUT_SMALL},
    "CISPO over a constant length, with an entropy, truncated ones left out": {
        "policy_loss": "cispo",
        "loss_aggregation": "constant_length",
        "max_new_tokens": 12,
        "entropy_coeff": 0.1,
        "mask_truncated_completions": True,
    },
    "KL off the reward, normalised over the batch, three optimizer steps": {
        "kl_ctl": 0.1,
        "adv_norm": AdvNormConfig(mean_level="batch", std_level="batch"),
        "recompute_logprob": True,
        "ppo_n_minibatches": 3,
        "c_clip": 1.5,
        "mb_spec": CUT_SMALL,
    },
    "adapters alone, layers computed twice": {
        "use_lora": True,
        "lora_rank": 4,
        "lora_alpha": 8.0,
        "gradient_checkpointing": True,
    },
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, layers computed twice": {"dtype": "bfloat16", "gradient_checkpointing": True, "mb_spec": CUT_SMALL},
}


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("untied") / "model", "llama", vocab_size=33)  # no half of 33 is whole


@pytest.fixture(scope="module")
def ref_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("reference") / "model", seed=1)


@pytest.fixture
def make_two(second):
    """A model on two ranks; the ranks part at the end of the test, or before with `close`."""
    made = []

    def make(folder, ref_folder=None, **settings):
        of_both = actor(folder, **settings), reference(ref_folder or folder, settings.get("dtype", "float32"))
        crew = Pair(second, *of_both, TEMPERATURE)
        made.append(PolicyModel(*of_both, temperature=TEMPERATURE, total_steps=10, ranks=crew))
        return made[-1]

    yield make
    for model in made:
        model.close()


one_rank = functools.partial(policy, temperature=TEMPERATURE)


def gradients(model):
    is_alone = model._ranks.size == 1
    return gradients_of(model._learner) if is_alone else model._ranks.gradients(model._learner)


def bits(model):
    facts, tensors = state_of(model)
    steps = {name: facts[name] for name in ("policy_version", "optimizer_steps")}
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()} | steps


def apart(ours, theirs):
    """The largest difference of any tensor, as a share of its largest entry."""
    assert ours.keys() == theirs.keys()
    return max(
        ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-6)).item() for name in ours
    )


def step(model, seed):
    stats = model.compute_gradients(make_groups(seed=seed))
    model.commit()
    return stats


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_equal_one(folder, ref_folder, make_two, tmp_path, variant):
    settings = {"optimizer": CLIPPED, "entropy_freq_steps": 1, **VARIANTS[variant]}
    is_exact = settings.get("dtype") != "bfloat16"
    near = FLOAT32 if is_exact else BFLOAT16
    one, two = one_rank(folder, ref_folder, **settings), make_two(folder, ref_folder, **settings)
    first = weights(one)
    for seed in range(STEPS):
        if seed:  # roundings grow from step to step, on one rank cut in another way too
            one.save(tmp_path / str(seed))
            two.load(tmp_path / str(seed))
        of_gradient = FLOAT32_GRADIENT if is_exact else BFLOAT16_GRADIENT
        groups = make_groups(seed=seed, truncated=(1, 6))
        alone, together = one.compute_gradients(groups), two.compute_gradients(groups)
        assert alone.grad_norm > CLIPPED.gradient_clipping, "it is clipped"
        difference = apart(gradients(two), gradients(one))
        if difference >= of_gradient:  # one rank alone, cut otherwise, is then as far from itself
            cut = one_rank(folder, ref_folder, **{**settings, "mb_spec": CUT_SMALL})
            if seed:
                cut.load(tmp_path / str(seed))
            cut.compute_gradients(groups)
            assert difference < of_gradient + apart(gradients(cut), gradients(one))
        assert together.loss == pytest.approx(alone.loss, abs=near)
        assert together.grad_norm == pytest.approx(alone.grad_norm, rel=of_gradient if is_exact else near)
        assert together.entropy == pytest.approx(alone.entropy, rel=near)
        assert together.logprob_distance.max == pytest.approx(alone.logprob_distance.max, rel=near)
        assert (together.n_tokens, together.n_learning) == (alone.n_tokens, alone.n_learning)
        ahead = two.step_ahead()
        assert ahead.loss == pytest.approx(one.step_ahead().loss, abs=10 * near)
        one.commit()
        two.commit()
    mine, theirs = weights(two), weights(one)
    off = torch.cat([(mine[name] - theirs[name]).abs().flatten() for name in theirs])
    moved = torch.cat([(first[name] - theirs[name]).abs().flatten() for name in theirs])
    assert off.mean() < near * moved.mean()
    assert off.max() < LR / 100 or not is_exact
    assert two.logprobs((3, 4), (5, 6)) == pytest.approx(one.logprobs((3, 4), (5, 6)), abs=10 * near)


@pytest.mark.slow
def test_an_untied_model_whose_rows_do_not_divide(untied, make_two):
    one, two = one_rank(untied), make_two(untied)
    assert bits(two) == bits(one)
    step(one, 0), step(two, 0)
    assert apart(weights(two), weights(one)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("rewards", [[[1.0, 0.0]], [[1.0, 1.0]]], ids=["two learn", "none learns"])
def test_fewer_sequences_than_would_fill_the_ranks(folder, make_two, rewards):
    one, two = one_rank(folder), make_two(folder)
    groups = make_groups(groups=1, samples=2, rewards=rewards)
    before = bits(two)
    alone, together = one.compute_gradients(groups), two.compute_gradients(groups)
    assert together.grad_norm == pytest.approx(alone.grad_norm, rel=FLOAT32)
    two.commit()
    assert (bits(two) == {**before, "policy_version": 1}) == (rewards == [[1.0, 1.0]])


def lonely(groups, *, logprob):
    """The same, with one log-prob of the longest completion replaced: what that does, it does on one rank."""
    longest = max((r for g in groups for r in g.rollouts), key=lambda r: len(r.completion.token_ids))
    spoilt = (logprob, *longest.completion.logprobs[1:])
    bad = dataclasses.replace(longest, completion=dataclasses.replace(longest.completion, logprobs=spoilt))
    return [dataclasses.replace(g, rollouts=tuple(bad if r is longest else r for r in g.rollouts)) for g in groups]


@pytest.mark.slow
def test_what_is_not_finite_on_one_rank_is_vetoed_on_both(folder, make_two):
    one, two = one_rank(folder), make_two(folder)
    step(two, 0), step(one, 0)
    before = bits(two)
    stats = two.compute_gradients(lonely(make_groups(seed=1), logprob=math.nan))
    assert "gradient norm is nan" in stats.problems
    with pytest.raises(TrainerError, match="must not be committed"):
        two.commit()
    two.discard()
    assert bits(two) == before
    assert two.weights_are_finite()
    step(two, 2), step(one, 2)
    assert apart(weights(two), weights(one)) < 1e-3


@pytest.mark.slow
def test_a_step_is_one_order_for_its_gradients_and_one_for_each_thing_that_moves_weights(folder, make_two):
    """One for each micro-batch made rank 0 wait for the others as often."""
    two = make_two(folder, mb_spec=CUT_SMALL, ppo_n_minibatches=2, recompute_logprob=True)
    assert two.compute_gradients(make_groups(groups=8)).n_micro_batches > 1
    two.step_ahead()
    two.commit()
    assert two._ranks.works == ["compute_gradients", "step_ahead", "commit"]


@pytest.mark.slow
def test_a_later_part_that_is_not_finite_is_seen_on_both_and_both_put_the_earlier_ones_back(folder, make_two):
    two = make_two(folder, ppo_n_minibatches=3, recompute_logprob=True)
    before = bits(two)
    groups = make_groups()
    broken = dataclasses.replace(groups[2].rollouts[0], reward=None)
    groups[2] = dataclasses.replace(groups[2], rollouts=(broken, *groups[2].rollouts[1:]))
    assert two.compute_gradients(groups).finite, "of the first part"
    assert not two.step_ahead().finite
    with pytest.raises(TrainerError, match="must not be committed"):
        two.commit()
    two.discard()
    assert bits(two) == before
    assert two.compute_gradients(make_groups(seed=1)).finite


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_steps_a_new_start_and_ten_more_are_twenty_bit_for_bit(folder, make_two, tmp_path, ranks):
    make = one_rank if ranks == 1 else make_two
    steady = dataclasses.replace(CLIPPED, lr_scheduler_type="constant")  # else the last ten would move nothing
    model = make(folder, optimizer=steady)
    for seed in range(20):
        if seed == 10:
            model.save(tmp_path / "ten")
        step(model, seed)
    twenty = bits(model)
    model.close()
    resumed = make(folder, optimizer=steady)
    resumed.load(tmp_path / "ten")
    for seed in range(10, 20):
        step(resumed, seed)
    assert bits(resumed) == twenty


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SGD", "NAdam", "RMSprop", "Adagrad"])
def test_another_optimizer_continues_on_two_ranks_and_its_state_is_that_of_one(folder, make_two, tmp_path, kind):
    """It was refused with several ranks: only AdamW's state could be put together and divided again."""
    settings = {"optimizer": OptimizerConfig(type=f"torch.optim:{kind}", lr=LR)}
    two = make_two(folder, **settings)
    step(two, 0), step(two, 1)
    two.save(tmp_path / "two")
    saved = bits(two)
    step(two, 2), step(two, 3)
    whole = bits(two)
    two.load(tmp_path / "two")
    assert bits(two) == saved
    step(two, 2), step(two, 3)
    assert bits(two) == whole
    one = one_rank(folder, **settings)
    one.load(tmp_path / "two")
    assert bits(one) == saved


@pytest.mark.slow
def test_an_optimizer_that_can_not_be_divided_is_refused_when_it_is_made(folder, make_two):
    """Torch's Adafactor fails at its first step on a divided tensor."""
    with pytest.raises(ConfigError, match=r"torch\.optim:Adafactor can't be divided over ranks: RuntimeError"):
        make_two(folder, optimizer=OptimizerConfig(type="torch.optim:Adafactor"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_of_two_is_one_of_one_and_the_other_way_round(folder, make_two, tmp_path, dtype):
    settings = {"dtype": dtype}
    two, saved, again = make_two(folder, **settings), tmp_path / "two", tmp_path / "one"
    step(two, 0), step(two, 1)
    two.save(saved)
    one = one_rank(folder, **settings)
    one.load(saved)
    assert bits(one) == bits(two)
    one.save(again)
    for file in (saved / "model.safetensors", saved / TENSORS_FILE, saved / FACTS_FILE):
        if file.name != TENSORS_FILE or dtype == "float32":
            assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    step(one, 2)
    one.save(again)
    two.load(again)
    assert bits(two) == bits(one)
    assert two.policy_version == 3
    near = 0.1 if dtype == "bfloat16" else 1e-3
    step(one, 3), step(two, 3)
    assert apart(weights(two), weights(one)) < near
    two.begin_anew()
    assert weights(two).keys() == weights(one).keys()
    assert bits(two) == bits(one_rank(folder, **settings))


@pytest.mark.slow
def test_in_bfloat16_two_are_no_farther_from_one_than_one_that_cuts_otherwise(folder, make_two):
    settings = {"dtype": "bfloat16", "optimizer": CLIPPED}
    models = (
        one_rank(folder, **settings),
        one_rank(folder, **settings, mb_spec=CUT_SMALL),
        make_two(folder, **settings),
    )
    for model in models:
        model.compute_gradients(make_groups())
    alone, otherwise, together = (gradients(model) for model in models)
    assert 0 < apart(together, alone) < 4 * apart(otherwise, alone)


def lead_astray(two, elsewhere):
    """Each path is another folder to rank 1, as where its node has mounted something else there."""

    def ask_each(part, work, *arguments, **named):
        two._ranks._pipe.send((work, tuple(elsewhere if isinstance(one, Path) else one for one in arguments), named))
        answer = getattr(part, work)(*arguments, **named)
        return [answer, two._ranks._hear()]

    two._ranks.ask_each = ask_each


@pytest.mark.slow
def test_rows_that_a_rank_wrote_elsewhere_are_missed_before_the_state_counts(untied, make_two, tmp_path):
    """The older state's rows lay there, and got a valid checksum."""
    two = make_two(untied)
    slot, elsewhere = tmp_path / "slot", tmp_path / "elsewhere"
    slot.mkdir()
    elsewhere.mkdir()
    step(two, seed=0)
    two.write_state(slot, two.training_state())
    step(two, seed=1)
    lead_astray(two, elsewhere)
    with pytest.raises(OSError, match=f"trainer rank 1 wrote is not in {slot / TENSORS_FILE}"):
        two.write_state(slot, two.training_state())


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_without_the_rows_of_a_rank_is_not_committed(folder, make_two, tmp_path, lora):
    two = make_two(folder, use_lora=lora)
    store, elsewhere = CheckpointStore(tmp_path / "checkpoints"), tmp_path / "elsewhere"
    (elsewhere / ADAPTER_FILE).parent.mkdir(parents=True)
    facts = {"global_step": 1, "policy_version": 1, "config_fingerprint": {}, "health": {}, "keep": False}
    with store.staging(CheckpointName(epoch=0, epoch_step=1, global_step=1)) as staged:
        assert store.commit(staged, written=two.save(staged), **facts)
    lead_astray(two, elsewhere)
    with store.staging(CheckpointName(epoch=0, epoch_step=2, global_step=2)) as staged:
        written = two.save(staged)
        with pytest.raises(CheckpointError, match=r"trainer rank 1 wrote is not in .*safetensors"):
            store.commit(staged, written=written, **facts | {"global_step": 2})
    assert [one.global_step for one in store.list()] == [1]


@pytest.mark.slow
def test_weights_without_the_rows_of_a_rank_are_not_published(folder, make_two, tmp_path):
    """Zeros lay in their place, and servers loaded them."""
    two = make_two(folder)
    shared, there, elsewhere = (tmp_path / name for name in ("shared", "there", "elsewhere"))
    for one in (shared, there, elsewhere):
        one.mkdir()
    step(two, 0)
    in_one_folder = two._ranks.ask_each
    lead_astray(two, elsewhere)
    with pytest.raises(TrainerError, match=r"trainer rank 1 wrote is not in .*safetensors"):
        two.export(there, torch.float32)
    two._ranks.ask_each = in_one_folder
    two.export(shared, torch.float32)
    assert apart(load_file(shared / WEIGHTS_FILE), weights(two)) == 0


def test_folders_that_ranks_do_not_share_pass_for_no_full_disk(tmp_path):
    """Room was asked for, and sound servers were restarted for it."""
    shared, elsewhere = tmp_path / "weights", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pieces = [
        {
            "weight": TensorRows(
                tensor=torch.ones(1, 2), dtype=torch.float32, shape=(2, 2), first_row=rank, is_whole=False
            )
        }
        for rank in (0, 1)
    ]

    class Apart(PolicyModel):
        def __init__(self):
            self._share_folders = False

        def _write_model(self, folder, dtype, **how):
            folders = (folder, elsewhere)
            return [overwrite_tensors(folders[rank] / WEIGHTS_FILE, pieces[rank], rank=rank) for rank in (0, 1)]

    folders = WeightFolders(shared, lambda folder: Apart().export(folder, torch.float32))
    with pytest.raises(TrainerError, match="trainer rank 1 wrote is not in ") as raised:
        folders.write(1)
    assert "must see the same cluster.fileroot" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_rank_syncs_what_it_wrote_of_a_checkpoint_and_of_nothing_else(folder, make_two, tmp_path, lora):
    """What the memory of its node held back was committed."""
    two, asked = make_two(folder, use_lora=lora), []
    ask_each = two._ranks.ask_each
    two._ranks.ask_each = lambda part, order, *given, **named: (
        asked.append((order, named.get("is_durable"))) or ask_each(part, order, *given, **named)
    )
    for name in ("model", "state", "published"):
        (tmp_path / name).mkdir()
    two.save(tmp_path / "model")
    assert asked == [("write_adapter" if lora else "write_weights", None if lora else True), ("write_state", True)]
    asked.clear()
    two.write_state(tmp_path / "state", two.training_state())
    two.export(tmp_path / "published", torch.float32)
    assert [durable for _, durable in asked] == [False] * (1 if lora else 2)


@pytest.mark.parametrize("lora", [False, True])
def test_each_file_of_a_checkpoint_that_a_further_rank_writes_a_part_of_is_synced(folder, tmp_path, monkeypatch, lora):
    """As if this process were rank 1: what a further rank writes, rank 0 can't sync for it."""
    model, synced = one_rank(folder, use_lora=lora), []
    monkeypatch.setattr(model._learner._group, "rank", 1)
    monkeypatch.setattr(stored_tensors.os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    for name in ("model", "state", "published"):
        (tmp_path / name).mkdir()
    model.save(tmp_path / "model")
    shared = {ADAPTER_FILE if lora else WEIGHTS_FILE, TENSORS_FILE}
    of_parts = [path for path in synced if path.suffix in (".safetensors", ".tensors")]
    assert sorted(of_parts) == sorted(tmp_path / "model" / name for name in shared)
    synced.clear()
    model._learner.write_state(
        tmp_path / "state", model.training_state().random, has_masters=False, is_copy=False, is_durable=False
    )
    model.export(tmp_path / "published", torch.float32)
    assert synced == []


@pytest.mark.parametrize(
    ("rank", "is_durable", "synced"), [(0, True, False), (0, False, False), (1, True, True), (1, False, False)]
)
def test_what_is_synced_of_a_file_by_whom(tmp_path, monkeypatch, rank, is_durable, synced):
    path, found = tmp_path / "tensors", []
    monkeypatch.setattr(stored_tensors.os, "fsync", lambda fd: found.append(path.read_bytes()))
    rows = TensorRows(tensor=torch.ones(1, 2), dtype=torch.float32, shape=(2, 2), first_row=rank, is_whole=False)
    overwrite_tensors(path, {"weight": rows}, rank=rank, is_durable=is_durable)
    assert found == ([path.read_bytes()] if synced else []), "all of it, once"


@pytest.mark.slow
def test_damage_in_the_slice_of_the_second_is_seen(folder, make_two, tmp_path):
    one, two = one_rank(folder), make_two(folder)
    assert two.weights_are_finite()
    with torch.no_grad():
        next(one._learner.model.parameters())[-1, -1] = math.inf
    one.save(tmp_path / "damaged")
    two.load(tmp_path / "damaged")
    assert next(two._learner.model.parameters()).to_local().isfinite().all()
    assert not two.weights_are_finite()


def listening(process):
    return {c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_each_holds_half_and_listens_on_one_address(folder, second, make_two):
    before = listening(psutil.Process())  # other tests of this process may have a cluster
    two = make_two(folder)
    whole = sum(p.numel() for p in one_rank(folder)._learner.model.parameters())
    step(two, 0)
    assert sum(p.to_local().numel() for p in two._learner.model.parameters()) == whole / 2
    held = (t.to_local().numel() for s in two._learner.optimizer.state.values() for t in s.values() if t.ndim)
    assert sum(held) == whole
    for opened in (listening(psutil.Process()) - before, listening(psutil.Process(second.process.pid))):
        assert {address.ip for address in opened} == {ADDRESS}


@pytest.mark.slow
def test_a_rank_of_an_earlier_life_meets_nobody():
    place = MeetingPlace(ADDRESS, size=2, timeout_s=1.0)
    earlier = MeetingPlace(ADDRESS, size=2, timeout_s=1.0)
    assert place.rendezvous.port != earlier.rendezvous.port
    late = dataclasses.replace(place.rendezvous, name=earlier.rendezvous.name)
    with pytest.raises(TrainerError, match="trainer rank 1 could not meet the others"):
        RankGroup.join(late, 1, own_address=ADDRESS, device=torch.device("cpu"))


def test_of_a_death_is_told_what_is_known_and_not_what_it_might_be():
    ray_says = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: TrainerRank\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR\nSome common causes "
        "include: (1) the process was killed by the OOM killer"
    )
    assert said(RayActorError(error_msg=ray_says)) == (
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    )


def test_an_address_that_no_interface_bears():
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(TrainerError, match=r"has the address 203\.0\.113\.9"):
        interface_of("203.0.113.9")


@given(st.lists(st.integers(1, 500)), st.integers(1, 5))
def test_deal_is_whole_and_fair(lengths, ranks):
    shares = deal(lengths, ranks=ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    tokens = [sum(lengths[index] for index in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1), st.integers(1, 4))
def test_all_ranks_make_the_same_passes(made, ranks):
    sequences = [SampledSequence(prompt=(1,), completion=(2,) * n, logprobs=(0.0,) * n) for n, _ in made]
    shares = share_out(sequences, [learns for _, learns in made], 32, ranks=ranks)
    passes = [[batch.learns for batch in share] for share in shares]
    assert passes == [passes[0]] * ranks
    found = [index for share in shares for batch in share for index in batch.sequences.unique().tolist()]
    assert sorted(found) == list(range(len(sequences)))
