"""Placement and memory: counted parameters, what fits where, and what a plan says of a machine that is too small."""

from dataclasses import replace

import pytest

from actors.model.token_logprobs import LOGITS_AT_ONCE
from launcher.checkpoints.model_files import read_shape
from launcher.checkpoints.model_shape import ModelShape, known_shape
from launcher.checkpoints.tensor_files import read_entries
from launcher.resources import memory_estimate
from launcher.resources.gpus import Gpu, visible
from launcher.resources.hardware import (
    cgroup_memory,
    device_for,
    find_hardware,
    planned_hardware,
)
from launcher.resources.memory_estimate import GIB, activation_bytes
from launcher.resources.placement import gpus_needed, place
from launcher.resources.run_plan import lacks, make_plan, smallest_gpu_gib
from tests.support.preflight_parts import NO_GPU, changed, printed
from tests.support.worlds.resources import ARITHMETIC, GSM8K, H200, LARGE, MODEL, QWEN


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the models' own pages on the hub count their safetensors
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
    ],
)
def test_parameters_of_published_models(name, parameters):
    assert known_shape(name).parameters == parameters


@pytest.mark.parametrize(
    ("config", "parameters"),
    [  # from their config.json and their pages: Qwen3-0.6B, Llama-3.2-1B, Mistral-7B-v0.3, Phi-4, OLMo-2-7B, Gemma-3-1B
        (
            {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16}
            | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936}
            | {"tie_word_embeddings": True},
            596_049_920,
        ),
        (
            {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
            | {"num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256}
            | {"tie_word_embeddings": True},
            1_235_814_400,
        ),
        (
            {"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
            | {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32768},
            7_248_023_552,
        ),
        (
            {"model_type": "phi3", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40}
            | {"num_key_value_heads": 10, "intermediate_size": 17920, "vocab_size": 100352},
            14_659_507_200,
        ),
        (
            {"model_type": "olmo2", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
            | {"num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 100352},
            7_298_617_344,
        ),
        (
            {"model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4}
            | {"num_key_value_heads": 1, "intermediate_size": 6912, "vocab_size": 262144},
            999_885_952,
        ),
    ],
)
def test_parameters_from_config_json(config, parameters):
    assert ModelShape.of(config).parameters == parameters


def test_parameters_and_names_are_those_in_the_file():
    shape = read_shape(MODEL)
    entries = read_entries(MODEL / "model.safetensors")
    assert shape.parameters * 4 == sum(entry.end - entry.begin for entry in entries.values())
    assert shape.tensors().keys() == entries.keys()


def test_unknown_models_have_no_shape():
    assert known_shape("Qwen/Qwen9-Instruct") is None


def test_the_largest_piece_of_logits_is_the_trainers():
    assert memory_estimate.LOGITS_AT_ONCE == LOGITS_AT_ONCE


def test_checkpointing_keeps_less():
    actor = changed(GSM8K, actor__gradient_checkpointing=False).actor
    assert activation_bytes(GSM8K.actor, QWEN) < activation_bytes(actor, QWEN) / 5


# ── placement ──


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [
        ({}, {"server-0": (0,), "trainer": (0,)}),
        ({"sglang__gpu_fraction": 0.6}, {"server-0": (0,), "trainer": (1,)}),
        ({"sglang__n_servers": 2}, {"server-0": (0,), "server-1": (0,), "trainer": (1,)}),
        (
            {"sglang__n_servers": 3, "sglang__gpu_fraction": 1 / 3, "actor__gpu_fraction": 1.0},
            {"server-0": (0,), "server-1": (0,), "server-2": (0,), "trainer": (1,)},
        ),
        (
            {"sglang__n_servers": 2, "sglang__tp_size": 2, "sglang__gpu_fraction": 1.0},
            {"server-0": (0, 1), "server-1": (2, 3), "trainer": (4,)},
        ),
    ],
)
def test_shares_are_packed(settings, gpus):
    config = changed(GSM8K, **settings)
    assert {b.name: b.gpus for b in place(config).processes} == gpus
    assert gpus_needed(config) == 1 + max(max(numbers) for numbers in gpus.values())


def test_on_the_cpu_nothing_is_booked():
    assert place(ARITHMETIC, servers_on="cpu", trainer_on="cpu").gpus == 0


# ── memory ──


def test_the_h200_preset_fits_an_h200():
    plan = make_plan(GSM8K, LARGE, QWEN)
    gpu, host = plan.places
    assert gpu.planned == sum(process.bytes for process in plan.processes)
    assert 0 < gpu.headroom < 20 * GIB
    assert host.headroom > 0
    assert lacks(plan) == []
    # 28 layers × 2 (key, value) × 2 KV heads × 128 × 2 bytes; 0.6 of what is free, less the weights
    assert plan.kv_tokens == (int(139 * GIB * 0.6) - 2 * QWEN.parameters) // 28_672


def test_states_are_sixteen_bytes_for_each_parameter_and_two_for_the_copy():
    trainer = make_plan(GSM8K, LARGE, QWEN).processes[-1]
    sizes = {item.what: item.bytes for item in trainer.items}
    assert sum(sizes[what] for what in ("weights", "gradients", "optimizer", "bfloat16 copy")) == 18 * QWEN.parameters


def test_a_gpu_that_is_too_small_is_named():
    small = replace(LARGE, gpus=(Gpu(name="L4", memory=23 * GIB, free=22 * GIB),))
    assert ["GPU 0 (L4)" in problem.subject for problem in lacks(make_plan(GSM8K, small, QWEN))] == [True]


def test_weights_alone_can_be_too_much():
    problems = lacks(make_plan(changed(GSM8K, sglang__mem_fraction_static=0.01), LARGE, QWEN))
    assert any("raise sglang.mem_fraction_static" in problem.hint for problem in problems)


def test_weights_larger_than_a_gpu_need_more_of_them():
    """A larger share of a GPU was advised for weights that the whole of it does not hold."""
    small = replace(LARGE, gpus=(Gpu(name="T4", memory=3 * GIB, free=int(2.5 * GIB)),))
    (of_server, *_) = lacks(make_plan(GSM8K, small, QWEN))
    assert (of_server.subject, of_server.hint) == ("a server", "raise sglang.tp_size")


@pytest.mark.parametrize(
    ("tokens", "said", "hint"),
    [
        (2_000_000, "; one server alone takes ", "lower sglang.max_total_tokens, or take a smaller model (actor.path)"),
        (400_000, "GiB are there", "lower sglang.max_total_tokens, sglang.n_servers, recovery.standby_trainers or "),
    ],
)
def test_a_server_that_no_node_alone_holds_is_told_from_servers_that_are_too_many(tokens, said, hint):
    """Fewer servers were advised where each alone was larger than the machine."""
    config = changed(GSM8K, sglang__device="cpu", actor__device="cpu", sglang__max_total_tokens=tokens)
    config.sglang.n_servers = 3
    (of_host,) = lacks(make_plan(config, replace(NO_GPU, memory=40 * GIB), QWEN))
    assert said in of_host.text
    assert of_host.hint.startswith(hint)


def test_the_smallest_gpu_is_where_it_begins_to_fit():
    gib = smallest_gpu_gib(GSM8K, NO_GPU, QWEN)

    def fits(size: int) -> bool:
        gpu = Gpu(name="GPU", memory=size * GIB, free=size * GIB)
        return not lacks(make_plan(GSM8K, replace(LARGE, gpus=(gpu,)), QWEN))

    assert fits(gib)
    assert not fits(gib - 4)


def test_memory_that_others_hold_is_not_there():
    taken = replace(LARGE, gpus=(replace(H200, free=60 * GIB),))
    plan = make_plan(GSM8K, taken, QWEN)
    assert plan.places[0].capacity == 60 * GIB
    assert any("other processes hold 80.0 GiB of GPU 0" in note for note in plan.notes)


def test_on_the_cpu_the_pool_is_what_was_asked_for():
    shape = read_shape(MODEL)
    plan = make_plan(ARITHMETIC, NO_GPU, shape)
    assert plan.devices == ("cpu", "cpu")
    assert plan.kv_tokens == 20_000
    assert [place.name for place in plan.places] == ["host memory"]
    assert lacks(plan) == []
    huge = changed(ARITHMETIC, sglang__max_total_tokens=100_000_000)
    assert any("host memory" in problem.subject for problem in lacks(make_plan(huge, NO_GPU, shape)))


def test_of_an_unknown_model_nothing_is_guessed():
    plan = make_plan(GSM8K, LARGE, None)
    assert plan.places == ()
    assert plan.kv_tokens is None
    assert all(process.items == () for process in plan.processes)
    assert any("unknown" in note for note in plan.notes)
    assert "unknown" in printed(GSM8K, plan)


# ── the machine ──


def test_auto_takes_a_gpu_where_there_is_one():
    assert [device_for("auto", LARGE), device_for("auto", NO_GPU), device_for("cpu", LARGE)] == ["cuda", "cpu", "cpu"]


def test_a_described_machine_replaces_the_gpus_found():
    described = planned_hardware(GSM8K, NO_GPU)
    assert [gpu.name for gpu in described.gpus] == ["NVIDIA H200"]
    assert described.memory == NO_GPU.memory
    assert planned_hardware(ARITHMETIC, NO_GPU) is NO_GPU


def test_this_machine():
    hardware = find_hardware()
    assert hardware.cpus >= 1
    assert 0 < hardware.memory_free <= hardware.memory
    assert bool(hardware.gpus) != bool(hardware.no_gpu)


@pytest.mark.parametrize(
    ("chosen", "positions"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("1,7,0", [1]),
        ("GPU-b", [1]),
        ("GPU-", []),
        ("0, 1", [0, 1]),
    ],
)
def test_cuda_visible_devices(chosen, positions):
    assert visible([("0", "GPU-a1"), ("1", "GPU-b2"), ("2", "GPU-c3")], chosen) == positions


def test_the_tightest_cgroup_counts(tmp_path):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    assert cgroup_memory(tmp_path, own) == (float("inf"), 0.0)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("2000\n")
    (inner.parent / "memory.current").write_text("500\n")
    assert cgroup_memory(tmp_path, own) == (2000.0, 500.0)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("100\n")
    assert cgroup_memory(tmp_path, own) == (1000.0, 100.0)
    (tmp_path / "memory/job").mkdir()
    (tmp_path / "memory/job/memory.limit_in_bytes").write_text("700\n")
    (tmp_path / "memory/job/memory.usage_in_bytes").write_text("60\n")
    own.write_text("4:memory:/job\n0::/outer/inner\n")
    assert cgroup_memory(tmp_path, own) == (700.0, 60.0)


# ── the view ──


@pytest.mark.parametrize("terminal", [True, False])
def test_the_plan_says_who_runs_where_and_what_it_takes(terminal):
    text = printed(GSM8K, make_plan(GSM8K, LARGE, QWEN), width=160, terminal=terminal)
    for part in (
        "server-0",
        "trainer",
        "on GPU 0, a share of 0.5",
        "KV cache",
        "optimizer",
        "host memory",
        "1,543.7 M",
    ):
        assert part in text
    assert ("\x1b" in text) == terminal


def test_what_is_too_small_is_said_in_the_plan():
    small = replace(LARGE, gpus=(Gpu(name="L4", memory=23 * GIB, free=22 * GIB),))
    text = printed(GSM8K, make_plan(GSM8K, small, QWEN), width=160)
    assert "MISSING" in text
    assert "too small: GPU 0 (L4)" in text
