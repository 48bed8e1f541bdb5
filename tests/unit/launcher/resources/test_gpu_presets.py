"""The presets for GPUs: each fits the card that it is for, and SGLang's own parser takes its servers' arguments."""

import json
import subprocess
import sys

import pytest
from transformers import Qwen2Config

from actors.serving.sglang_command import command
from launcher.resources.config_checks import check
from launcher.resources.cuda_graphs import graph_bytes, sequences_at_once, with_graphs
from launcher.resources.hardware import find_hardware, planned_hardware
from launcher.resources.memory_estimate import GIB, MIB, prefill_chunk
from launcher.resources.missing_files import find_shape
from launcher.resources.run_plan import lacks, make_plan
from tests.support.composed import composed
from tests.support.machine import scaled

ONE, NODE = ["gsm8k_one_80gb"], ["gsm8k_node_80gb"]
ON = {"H200": ["gsm8k_h200", "gsm8k_h200_cluster"], "H100": ONE + NODE, "A100": ONE + NODE, "4090": ["gsm8k_one_24gb"]}
ATTENTION = {"H200": "fa3", "H100": "fa3", "A100": "flashinfer", "4090": "flashinfer"}
SIZES = {  # hidden, intermediate, layers, heads, heads of the KV cache
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "7B": (3584, 18944, 28, 28, 4),
}


@pytest.mark.parametrize("preset", sorted({preset for presets in ON.values() for preset in presets}))
def test_a_preset_fits_the_cards_that_it_is_for(preset):
    config = composed(f"conf={preset}")
    check(config)
    plan = make_plan(config, planned_hardware(config, find_hardware()), find_shape(config))
    assert plan.shortage is None
    assert [problem for problem in lacks(plan) if "host memory" not in problem.subject] == []
    at_once = config.rollout.max_concurrent_rollouts / config.sglang.n_servers * config.gconfig.n_samples
    longest = (config.train_dataset.max_length or 0) + config.gconfig.max_new_tokens
    assert plan.kv_tokens is not None
    assert plan.kv_tokens >= at_once * longest, "no sequence waits for another's room in the KV cache"


@pytest.mark.parametrize("preset", sorted({preset for presets in ON.values() for preset in presets}))
def test_a_preset_asks_for_the_mark_that_its_reward_pays_for(preset):
    """As AReaL does, in the same words: else the first rewards measure a habit of format."""
    config = composed(f"conf={preset}")
    assert config.chat.question_suffix == "\nPlease put your final answer within \\boxed{}."
    assert config.reward.fn == "actors.reward:gsm8k_reward"


def model_folder(name, parent):
    hidden, intermediate, layers, heads, kv_heads = next(SIZES[size] for size in SIZES if f"-{size}-" in name)
    folder = parent / name.replace("/", "-")
    Qwen2Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("card", ON)
def test_sglangs_own_parser_takes_each_servers_arguments_on_its_card(card, tmp_path):
    configs = [composed(f"conf={preset}") for preset in ON[card]]
    asked = [
        command(
            with_graphs(config),
            entry=(),
            device="cuda",
            index=0,
            generation=0,
            model_path=str(model_folder(config.actor.path, tmp_path)),
            weight_version=0,
            port=30000,
        )
        for config in configs
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.fake_cuda", card, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for config, made in zip(configs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert (made["attention_backend"], made["sampling_backend"]) == (ATTENTION[card], "flashinfer")
        assert (made["mem_fraction_static"], made["dtype"]) == (config.sglang.mem_fraction_static, "bfloat16")
        assert made["context_length"] == config.sglang.context_length
        assert made["graphs"][-1] == sequences_at_once(config), "each batch that there may be has a graph"
        chunk = prefill_chunk(int(config.hardware.gpu_memory_gib * GIB))
        assert made["graph_mib"] * MIB == graph_bytes(config, chunk), "the plan has what SGLang reserves for them"
