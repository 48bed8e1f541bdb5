"""A remedy that names a setting is one that this run can take: composed with it, the run is accepted.

Each row is a run that is refused, and the words of its message that a person would type; no other may be in its hint.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from launcher.base.errors import ConfigError, ResourceError
from launcher.checkpoints.in_memory_checkpoints import MEMORY_BACKED
from launcher.config.schema import RunConfig
from launcher.config.settings import settings_of
from launcher.resources.config_checks import check, find_problems
from launcher.resources.memory_estimate import GIB
from launcher.resources.missing_files import find_shape
from launcher.resources.missing_machine import missing_gpus, missing_memory, missing_room
from launcher.resources.run_plan import make_plan
from tests.support.composed import composed
from tests.support.preflight_parts import NO_GPU, WITH_GPU

TYPED = re.compile(r"(?<![\w./-])[a-z_]+(?:\.[a-z_]+)+=[\w:/.-]*\w")
ON_CPU, ON_GPU = ["conf=arithmetic_cpu"], ["conf=gsm8k_h200"]
OWN_GPUS = ["sglang.gpu_fraction=1", "actor.gpu_fraction=1"]
AUTO = ["sglang.device=auto", "actor.device=auto"]
CLUSTER = ["cluster.address=10.0.0.1:6379", "cluster.n_nodes=2"]


def machine(gpus):
    if gpus == 0:
        return NO_GPU
    return replace(WITH_GPU, gpus=WITH_GPU.gpus * gpus, memory=1000 * GIB, memory_free=1000 * GIB)


def of_the_settings(settings):
    """The problems by themselves."""
    return [(str(problem), problem.text) for problem in find_problems(composed(*settings))]


def of_the_machine(settings, hardware):
    config = composed(*settings)
    check(config)
    plan = make_plan(config, hardware, find_shape(config))
    found = [*missing_gpus(config, hardware, plan), *missing_memory(plan), *missing_room(config, plan)]
    return [(error.message, error.hint) for error in found]


# ── the way of new weights, where /dev/shm is too small for files ──


@pytest.fixture
def small_shared_memory(monkeypatch):
    def disk_usage(folder):
        return SimpleNamespace(free=0 if folder == MEMORY_BACKED else 1000 * GIB)

    monkeypatch.setattr("launcher.resources.missing_machine.shutil.disk_usage", disk_usage)


@pytest.mark.parametrize(
    ("settings", "gpus", "mode"),
    [
        (["conf=gsm8k_node_80gb"], 8, "xccl"),
        ([*ON_GPU, *OWN_GPUS], 2, "xccl"),
        (ON_GPU, 1, "tensor"),
        (["conf=gsm8k_one_80gb"], 1, "tensor"),
        (ON_CPU, 0, "tensor"),
        ([*ON_GPU, *AUTO], 1, "tensor"),
        ([*ON_GPU, *AUTO, *OWN_GPUS], 2, "xccl"),
        ([*ON_GPU, "sglang.dp_size=2", *OWN_GPUS], 3, ""),
        ([*ON_GPU, "sglang.device=auto", *OWN_GPUS], 2, ""),
    ],
)
@pytest.mark.usefixtures("small_shared_memory")
def test_the_way_of_weights_that_needs_no_files_is_one_that_the_run_can_take(settings, gpus, mode):
    hardware = machine(gpus)
    ((said, hint),) = of_the_machine(settings, hardware)
    assert said.startswith(f"{MEMORY_BACKED}: weights on their way to the servers need ")
    assert TYPED.findall(hint) == ([f"actor.weight_update_mode={mode}"] if mode else [])
    assert hint.startswith("enlarge it (docker: --shm-size)")
    if mode:
        assert of_the_machine([*settings, *TYPED.findall(hint)], hardware) == []


# ── what the machine lacks ──


@pytest.mark.parametrize(
    ("settings", "cpu"),
    [
        ([*ON_CPU, *AUTO], ["sglang.device=cpu", "actor.device=cpu"]),
        (
            [*ON_GPU, *AUTO, *OWN_GPUS, "sglang.tp_size=2"],
            ["sglang.device=cpu", "actor.device=cpu", "sglang.tp_size=1", "sglang.max_total_tokens=20000"],
        ),
        (
            [*ON_GPU, *AUTO, *OWN_GPUS, "sglang.dp_size=2", "sglang.context_length=30000"],
            ["sglang.device=cpu", "actor.device=cpu", "sglang.dp_size=1", "sglang.max_total_tokens=30000"],
        ),
    ],
)
def test_a_run_that_a_machine_with_an_unusable_gpu_takes_on_its_cpu(settings, cpu):
    config, hardware = composed(*settings), replace(NO_GPU, is_unusable=True)
    plan = make_plan(config, hardware, find_shape(config))
    first = next(missing_gpus(config, hardware, plan))
    assert "would take the CPU" in first.message
    assert sorted(TYPED.findall(first.hint)) == sorted(cpu)
    again = composed(*settings, *TYPED.findall(first.hint))
    check(again)
    assert list(missing_gpus(again, hardware, make_plan(again, hardware, find_shape(again)))) == []


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        (["sglang.max_total_tokens=null"], 20000),
        (["sglang.max_total_tokens=null", "sglang.context_length=25000"], 25000),
        (
            ["sglang.max_total_tokens=null", "gconfig.max_new_tokens=30000", "sglang.context_length=null"],
            30001,
        ),
    ],
)
def test_the_token_pool_s_example_is_large_enough(settings, given):
    settings = [*ON_CPU, "train_dataset.max_length=null", "actor.mb_spec.max_tokens_per_mb=40000", *settings]
    ((said, _),) = of_the_settings(settings)
    assert f"(e.g. {given})" in said
    assert of_the_settings([*settings, f"sglang.max_total_tokens={given}"]) == []


@pytest.mark.parametrize(
    ("settings", "gpus", "ways", "example"),
    [
        (
            [*ON_GPU, *OWN_GPUS],
            1,
            "let them share a GPU (sglang.gpu_fraction, actor.gpu_fraction), or join a cluster with more nodes "
            "(cluster.address, cluster.n_nodes)",
            ["sglang.gpu_fraction=0.5", "actor.gpu_fraction=0.5"],
        ),
        (
            [*ON_GPU, *OWN_GPUS, "sglang.tp_size=2"],  # a server has its GPUs on one node
            1,
            "lower sglang.tp_size, or take larger nodes",
            ["sglang.tp_size=1"],
        ),
        (
            [*ON_GPU, *OWN_GPUS, "actor.weight_update_mode=xccl"],
            1,
            "or join a cluster with more nodes (cluster.address, cluster.n_nodes)",
            CLUSTER,
        ),
        ([*ON_GPU, *OWN_GPUS, *CLUSTER], 0, "let them share a GPU", ["sglang.gpu_fraction=0.5"]),
        ([*ON_GPU, *OWN_GPUS, *CLUSTER], 0, "or add nodes (cluster.n_nodes)", ["cluster.n_nodes=3"]),
    ],
)
def test_gpus_that_are_short(settings, gpus, ways, example):
    config = composed(*settings)
    check(config)
    hardware = replace(WITH_GPU, gpus=WITH_GPU.gpus * gpus)
    shortage = make_plan(config, hardware, find_shape(config)).shortage
    assert isinstance(shortage, ResourceError)
    assert ways in shortage.hint
    assert ("share a GPU" in shortage.hint) == ("share a GPU" in ways or ways.startswith("or add"))
    check(composed(*settings, *example))


WAYS_TO_LESS_MEMORY = (
    *("sglang.mem_fraction_static=0.5", "actor.mb_spec.max_tokens_per_mb=4096", "actor.gradient_checkpointing=true"),
    *("sglang.max_total_tokens=8192", "sglang.n_servers=1", "recovery.standby_trainers=0"),
    *("rollout.max_head_offpolicyness=0", "actor.dp_size=2"),
)


def test_each_way_to_less_memory_is_a_setting():
    config = composed(*ON_GPU)
    small = replace(WITH_GPU, gpus=(replace(WITH_GPU.gpus[0], memory=GIB, free=GIB),), memory=GIB)
    hints = "; ".join(error.hint for error in missing_memory(make_plan(config, small, find_shape(config))))
    assert [way for way in WAYS_TO_LESS_MEMORY if way.partition("=")[0] not in hints] == []
    known = {setting.key for setting in settings_of(RunConfig)}
    assert {*re.findall(r"[a-z_]+(?:\.[a-z_]+)+", hints)} <= known


@pytest.mark.parametrize("preset", [ON_CPU, ON_GPU])
def test_both_kinds_of_run_take_each_way_to_less_memory(preset):
    """All of them at once, since each is one that the others leave possible."""
    assert of_the_settings([*preset, *WAYS_TO_LESS_MEMORY]) == []


# ── settings that contradict each other ──


@pytest.mark.parametrize(
    ("settings", "key", "ways"),
    [
        # tensors, where a group is no way either
        ([*ON_GPU, *CLUSTER, "actor.weight_update_mode=tensor"], "actor.weight_update_mode", "disk"),
        ([*ON_GPU, *CLUSTER, "actor.weight_update_mode=xccl"], "actor.weight_update_mode", "disk"),
        ([*ON_GPU, *CLUSTER, *OWN_GPUS, "actor.weight_update_mode=tensor"], "actor.weight_update_mode", "disk or xccl"),
        ([*ON_GPU, *OWN_GPUS, "actor.weight_update_mode=tensor"], "actor.weight_update_mode", "disk or xccl"),
        (
            [*ON_GPU, *OWN_GPUS, "sglang.device=auto", "actor.weight_update_mode=tensor"],
            "actor.weight_update_mode",
            "disk",
        ),
        ([*ON_GPU, "actor.weight_update_mode=xccl"], "actor.weight_update_mode", "disk or tensor"),
        (
            [*ON_GPU, *OWN_GPUS, "sglang.device=auto", "actor.weight_update_mode=xccl"],
            "actor.weight_update_mode",
            "disk",
        ),
        ([*ON_GPU, *OWN_GPUS, "sglang.dp_size=2", "actor.weight_update_mode=xccl"], "actor.weight_update_mode", "disk"),
    ],
)
def test_each_way_of_weights_that_is_named_in_place_of_another_is_accepted(settings, key, ways):
    ((_, allowed),) = of_the_settings(settings)
    assert allowed.startswith(f"{ways} with ")
    for way in ways.split(" or "):
        assert of_the_settings([*settings, f"{key}={way}"]) == []


RECOMPUTE = ["actor.recompute_logprob=true", "actor.use_decoupled_loss=false"]
LATER = "rollout.max_head_offpolicyness=2"


@pytest.mark.parametrize(
    ("settings", "words", "fixes"),
    [
        ([LATER, *RECOMPUTE], ["0 with", "or actor.use_decoupled_loss=true"], ["actor.use_decoupled_loss=true"]),
        ([LATER, *RECOMPUTE], ["0 with"], ["rollout.max_head_offpolicyness=0"]),
        (["gconfig.min_new_tokens=4", "actor.recompute_logprob=false"], ["0, or with "], RECOMPUTE),
        (["gconfig.min_new_tokens=4", "actor.recompute_logprob=false"], ["0, or with "], ["gconfig.min_new_tokens=0"]),
        (
            ["gconfig.min_new_tokens=4", LATER, "actor.recompute_logprob=false"],
            ["0 (the"],
            ["gconfig.min_new_tokens=0"],
        ),
        (["cluster.n_nodes=2"], ["ip:port"], CLUSTER),
        (["cluster.detached=true"], ["false with"], ["cluster.detached=false"]),
        (["cluster.detached=true"], ["give its ip:port"], ["cluster.address=10.0.0.1:6379"]),
        (
            ["actor.dynamic_sampling=2", "total_train_steps=null", "actor.optimizer.lr_scheduler_type=cosine"],
            ["constant with", "or set total_train_steps"],
            ["actor.optimizer.lr_scheduler_type=constant"],
        ),
        (
            ["actor.dynamic_sampling=2", "total_train_steps=null", "actor.optimizer.lr_scheduler_type=cosine"],
            ["constant with", "or set total_train_steps"],
            ["total_train_steps=100"],
        ),
        (["actor.gather_dtype=bfloat16", "actor.dtype=float32"], ["float32 with"], ["actor.gather_dtype=float32"]),
        (["sglang.tp_size=2"], ["1 with sglang.device=cpu"], ["sglang.tp_size=1"]),
        (["sglang.port=65535", "sglang.n_servers=2"], ["at most 65534"], ["sglang.port=65534"]),
        (["sglang.host=0.0.0.0"], ["127.0.0.1"], ["sglang.host=127.0.0.1"]),
        (["evaluator.freq_steps=5", "valid_dataset=null"], ["null without"], ["evaluator.freq_steps=null"]),
    ],
)
def test_what_a_contradiction_names_instead_is_accepted(settings, words, fixes):
    settings = [*ON_CPU, "evaluator.freq_epochs=null", *settings]
    (said, _), *more = of_the_settings(settings)
    assert more == []
    for word in words:
        assert word in said
    assert of_the_settings([*settings, *fixes]) == []


def test_a_loss_that_another_setting_rules_out_is_not_named():
    ((said, _),) = of_the_settings([*ON_CPU, "gconfig.min_new_tokens=4", LATER, *RECOMPUTE])
    assert "rollout.max_head_offpolicyness=2: 0 with actor.recompute_logprob=true" in said
    assert "use_decoupled_loss" not in said


@pytest.mark.parametrize(
    ("settings", "may_share"),
    [
        (OWN_GPUS, True),
        ([*OWN_GPUS, "sglang.tp_size=2", "cluster.n_gpus_per_node=2"], False),
        ([*OWN_GPUS, "actor.weight_update_mode=xccl"], False),
    ],
)
def test_a_gpu_is_shared_only_where_that_is_allowed(settings, may_share):
    settings = [*ON_GPU, "cluster.n_gpus_per_node=1", *settings]
    with pytest.raises(ConfigError) as refused:
        check(composed(*settings))
    assert ("to share one" in refused.value.message) == may_share
    if may_share:
        check(composed(*settings, "sglang.gpu_fraction=0.5", "actor.gpu_fraction=0.5"))
