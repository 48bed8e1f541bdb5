"""The plan of several nodes: memory of ranks and servers by part, machines that are only described, and the view."""

from dataclasses import replace

import pytest

from launcher.base.errors import UsageError
from launcher.base.wording import ranges
from launcher.checkpoints.model_shape import known_shape
from launcher.config.compose import REPOSITORY
from launcher.resources.gpus import Gpu
from launcher.resources.hardware import planned_hardware
from launcher.resources.memory_estimate import CUDA_CONTEXT_BYTES, GIB, server_on_gpu, trainer
from launcher.resources.preflight import find_missing
from launcher.resources.run_plan import lacks, make_plan, with_standby_trainer
from tests.support.composed import composed
from tests.support.preflight_parts import NO_GPU, changed, printed

GSM8K = composed("conf=gsm8k_h200")
CLUSTER = composed("conf=gsm8k_h200_cluster")
QWEN = known_shape("Qwen/Qwen2.5-7B-Instruct")
SMALL = known_shape("Qwen/Qwen2.5-1.5B-Instruct")


def plan_of(config, shape=QWEN):
    return make_plan(config, planned_hardware(config, NO_GPU), shape)


def sizes(items):
    return {item.what: item.bytes for item in items}


# ── memory by part ──


def test_states_are_divided_by_the_ranks():
    eight = sizes(trainer(CLUSTER, QWEN, on_gpu=True))
    assert eight["weights"] + eight["gradients"] + eight["optimizer"] == 16 * QWEN.parameters // 8
    assert "bfloat16 copy" not in eight, "it is gathered in bfloat16"
    in_float32 = sizes(trainer(changed(CLUSTER, actor__gather_dtype="float32"), QWEN, on_gpu=True))
    assert in_float32["bfloat16 copy"] == 2 * QWEN.parameters, "autocast's, of what each rank has gathered"
    head_gradient = QWEN.vocab * QWEN.hidden
    assert eight["gathered"] == 2 * (QWEN.outside_layers + head_gradient + 4 * QWEN.layer)
    assert in_float32["gathered"] == 2 * eight["gathered"]
    one = sizes(trainer(changed(CLUSTER, actor__dp_size=1), QWEN, on_gpu=True))
    assert one["weights"] == 8 * eight["weights"]
    assert one["activations"] == eight["activations"], "each rank has micro-batches of its own"


def test_the_reference_is_divided_too():
    config = changed(CLUSTER, actor__kl_ctl=0.1)
    assert sizes(trainer(config, QWEN, on_gpu=True))["reference"] == 2 * QWEN.parameters // 8


def test_layers_and_what_is_outside_of_them_are_all_parameters():
    assert QWEN.outside_layers + QWEN.layers * QWEN.layer == QWEN.parameters
    assert QWEN.outside_layers == 2 * 152_064 * 3584 + 3584


@pytest.mark.parametrize(("tp_size", "of_the_heads"), [(1, 1), (2, 2), (4, 2), (12, 2)])
def test_heads_of_the_cache_are_divided_and_then_repeated(tp_size, of_the_heads):
    """Qwen2.5-1.5B has 2 KV heads: more GPUs hold them twice, and no more tokens."""
    assert SMALL.kv_bytes_on_each("bfloat16", tp_size) == SMALL.kv_bytes_per_token("bfloat16") // of_the_heads


def test_a_servers_weights_are_divided_by_tp_and_its_copies_are_not():
    alone = sizes(server_on_gpu(CLUSTER, QWEN, 139 * GIB))
    four = sizes(server_on_gpu(changed(CLUSTER, sglang__tp_size=4), QWEN, 139 * GIB))
    assert alone["weights"] == 2 * QWEN.parameters == 4 * four["weights"]
    assert alone["CUDA context"] == four["CUDA context"] == CUDA_CONTEXT_BYTES
    two = changed(CLUSTER, sglang__dp_size=2, sglang__n_servers=4)
    assert sizes(server_on_gpu(two, QWEN, 139 * GIB)) == alone
    assert plan_of(two).kv_tokens == 2 * plan_of(CLUSTER).kv_tokens


# ── the presets, planned where there is no GPU ──


def test_the_cluster_preset_fits_its_cluster():
    plan = plan_of(CLUSTER)
    assert (plan.shortage, lacks(plan), plan.gpus_needed, plan.n_nodes) == (None, [], 16, 2)
    by_node = {(place.node, place.gpu): place for place in plan.places}
    assert len(by_node) == 18
    assert by_node[0, 0].planned == plan.processes[-1].bytes, "ranks on node 0"
    assert by_node[1, 7].planned == plan.processes[0].bytes, "servers on node 1"
    assert all(place.headroom > 5 * GIB for place in plan.places)
    # the figures that stand in its comments
    states = sum(sizes(plan.processes[-1].items)[part] for part in ("weights", "gradients", "optimizer"))
    assert round(16 * QWEN.parameters / GIB) == 113
    assert round(states / GIB) == 14
    assert round(2 * QWEN.parameters / GIB) == 14
    assert round(plan.kv_tokens / 1e6, 1) == 1.9
    longest = CLUSTER.train_dataset.max_length + CLUSTER.gconfig.max_new_tokens
    assert plan.kv_tokens // longest // 50 * 50 == 1250
    of_a_step = CLUSTER.train_dataset.batch_size * CLUSTER.gconfig.n_samples
    assert (of_a_step, of_a_step // CLUSTER.sglang.n_servers) == (4096, 512)
    two = plan_of(changed(CLUSTER, sglang__tp_size=2, sglang__n_servers=4))
    assert round(two.kv_tokens / plan.kv_tokens, 1) == 2.1


def test_one_gpu_could_not_train_it():
    alone = changed(CLUSTER, actor__dp_size=1)
    assert any("GPU 0" in problem.subject for problem in lacks(plan_of(alone)))


def test_both_presets_are_planned_on_a_machine_without_gpus():
    assert plan_of(GSM8K, SMALL).shortage is None
    assert lacks(plan_of(GSM8K, SMALL)) == []


def test_a_described_node_has_its_own_memory_and_cpus():
    described = planned_hardware(CLUSTER, NO_GPU)
    assert (described.n_nodes, len(described.gpus), described.cpus) == (2, 8, 192)
    assert described.memory == 2000 * GIB
    host = planned_hardware(changed(GSM8K, hardware__memory_gib_per_node=8.0), NO_GPU)
    assert any("host memory" in problem.subject for problem in lacks(make_plan(GSM8K, host, SMALL)))


@pytest.mark.slow
def test_nodes_of_which_nothing_is_said_are_like_this_machine_and_refuse_no_run():
    config = composed("conf=arithmetic_cpu", "cluster.address=auto", "cluster.n_nodes=2", "actor.dp_size=2")
    hardware = planned_hardware(config, replace(NO_GPU, memory=GIB))
    assert (hardware.n_nodes, hardware.is_described) == (2, False)
    plan = make_plan(config, hardware, SMALL)
    assert any("2 nodes of 0 GPUs, 2 CPUs, 1 GiB each like this machine" in note for note in plan.notes)
    assert not any("memory" in str(error) for error in find_missing(config, hardware, plan))


def test_of_nodes_only_counted_each_gets_its_part_of_the_gpus():
    config = changed(CLUSTER, cluster__n_gpus_per_node=None)
    assert len(planned_hardware(config, NO_GPU).gpus) == 8


# ── what is refused before anything is started ──


@pytest.mark.slow
def test_a_described_cluster_that_is_too_small_is_refused():
    config = changed(CLUSTER, hardware__gpu_memory_gib=80.0, sglang__mem_fraction_static=0.99)
    config.actor.path = config.sglang.model_path = config.tokenizer_path = "nowhere/7b"
    hardware = planned_hardware(config, NO_GPU)
    said = [str(error) for error in find_missing(config, hardware, make_plan(config, hardware, QWEN))]
    assert any("memory: node 1 GPU 0-7 (NVIDIA H200): " in one for one in said)


def test_fewer_gpus_than_are_booked_on_this_machine():
    gpu = Gpu(name="NVIDIA H200", memory=140 * GIB, free=139 * GIB)
    here = replace(NO_GPU, gpus=(gpu,) * 4, no_gpu="")
    config = changed(GSM8K, sglang__gpu_fraction=1.0, actor__gpu_fraction=1.0, actor__dp_size=4)
    shortage = make_plan(config, here, SMALL).shortage
    assert isinstance(shortage, UsageError)
    assert shortage.message.endswith("; 1 node with 4 GPUs in all")
    assert "sglang.n_servers" in shortage.hint


# ── the view ──


def test_the_table_is_read_on_100_columns():
    text = printed(CLUSTER, plan_of(CLUSTER))
    table = text[text.index("server-0 … server-7:") : text.index("note:")]
    assert max(map(len, table.splitlines())) <= 100
    for part in (
        "server-0 … server-7: on GPU 0-7 of node 1, one each, CPUs: 8 each",
        "trainer … trainer-7 (8 ranks): on GPU 0-7 of node 0, one each, CPUs: 8 each",
        "KV cache",
        "optimizer",
        "activations",
        "gathered",
        "node 0 GPU 0-7 (NVIDIA H200)",
        "node 1 host memory",
        "headroom",
        "planned for 2 nodes of 8 GPUs, 192 CPUs, 2000 GiB each",
    ):
        assert part in text


def test_the_page_shows_what_is_printed():
    plan = with_standby_trainer(CLUSTER, planned_hardware(CLUSTER, NO_GPU), plan_of(CLUSTER))
    text = printed(CLUSTER, plan).replace(CLUSTER.cluster.fileroot, "outputs/grpo")
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    assert f"```\n{lines}\n```" in (REPOSITORY / "docs/gpu.md").read_text()


def test_what_can_not_be_placed_is_said_in_the_plan():
    config = changed(CLUSTER, sglang__n_servers=9)
    text = printed(config, plan_of(config))
    assert "note: can't be placed: 17 GPUs and 136 CPUs are asked for: " in text


@pytest.mark.parametrize(
    ("numbers", "words"), [([0], "0"), ([0, 1], "0, 1"), ([0, 1, 2, 5, 7, 8, 9], "0-2, 5, 7-9"), ([], "")]
)
def test_numbers_in_a_row_are_a_range(numbers, words):
    assert ranges(numbers) == words
