"""What no machine could run is refused with key, given value and what is allowed; what is only odd is a note."""

import re

import pytest

from launcher.base.errors import ConfigError
from launcher.config.compose import compose
from launcher.config.schema import DatasetConfig
from launcher.resources.config_checks import check, find_notes, find_problems
from tests.support.composed import composed
from tests.support.preflight_parts import changed

ARITHMETIC = compose(  # with the values that the cases below stand on, whatever the preset's recipe becomes
    [
        "conf=arithmetic_cpu",
        *("total_train_epochs=1", "total_train_steps=200", "saver.freq_epochs=1", "saver.freq_steps=null"),
        *(
            "recover.freq_epochs=null",
            "recover.freq_steps=20",
            "recover.freq_secs=null",
            "recover.first_steps=null",
            "evaluator.freq_steps=100",
        ),
        *("gconfig.max_new_tokens=26", "train_dataset.batch_size=16", "train_dataset.max_length=null"),
        *("sglang.context_length=256", "sglang.max_total_tokens=20000", "actor.mb_spec.max_tokens_per_mb=8192"),
        *("actor.optimizer.warmup_steps=5", "sglang.dtype=float32", "actor.dtype=float32"),
    ]
)
GSM8K = composed("conf=gsm8k_h200")
CLUSTER = composed("conf=gsm8k_h200_cluster")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sglang__mem_fraction_static": 1.0}, "sglang.mem_fraction_static=1.0: allowed: more than 0 and less than 1"),
        ({"sglang__mem_fraction_static": 0.0}, "sglang.mem_fraction_static=0.0"),
        ({"gconfig__n_samples": 1}, "gconfig.n_samples=1: allowed: at least 2"),
        ({"gconfig__temperature": 0.0}, "gconfig.temperature=0.0: allowed: at least 1e-06"),
        ({"gconfig__top_p": 1.5}, "gconfig.top_p=1.5"),
        ({"gconfig__top_k": 0}, "gconfig.top_k=0: allowed: -1 or at least 1"),
        ({"train_dataset__batch_size": 0}, "train_dataset.batch_size=0: allowed: at least 1"),
        ({"valid_dataset__max_items": 0}, "valid_dataset.max_items=0"),
        ({"actor__eps_clip": -0.1}, "actor.eps_clip=-0.1: allowed: at least 0"),
        ({"actor__optimizer__lr": 0.0}, "actor.optimizer.lr=0.0"),
        ({"actor__optimizer__lr": float("nan")}, "actor.optimizer.lr=nan"),
        ({"actor__optimizer__beta2": 1.0}, "actor.optimizer.beta2=1.0"),
        ({"actor__dtype": "float16"}, "actor.dtype=float16: allowed: float32, bfloat16"),
        ({"sglang__device": "gpu"}, "sglang.device=gpu: allowed: auto, cpu, cuda"),
        ({"actor__loss_aggregation": "mean"}, "allowed: token_mean, sequence_mean"),
        ({"actor__weight_update_mode": "nccl"}, "allowed: disk, tensor, xccl"),
        ({"recover__mode": "fault"}, "recover.mode=fault: allowed: auto, on, off"),
        ({"stats_logger__wandb__mode": "on"}, "allowed: online, offline, disabled"),
        ({"rollout__request_retries": -1}, "rollout.request_retries=-1: allowed: at least 0"),
        ({"rollout__request_timeout": 0.0}, "rollout.request_timeout=0.0"),
        ({"rollout__request_timeout": float("inf")}, "would never fire"),
        ({"rollout__request_timeout": 1e9}, "at most 86400, since a deadline of more than a day would never fire"),
        ({"rollout__setup_timeout": 2.0}, "rollout.setup_timeout=2.0: allowed: at least 10"),
        ({"actor__weight_update_timeout": float("inf")}, "actor.weight_update_timeout=inf"),
        ({"reward__fn": "gsm8k_reward"}, "reward.fn=gsm8k_reward: allowed: module:function"),
        ({"experiment_name": "../other"}, "experiment_name=../other: allowed: a folder's name"),
        ({"trial_name": ""}, "trial_name="),
        ({"trial_name": ".hidden"}, "trial_name=.hidden"),
        ({"trial_name": "a/b"}, "trial_name=a/b"),
        ({"trial_name": "a b"}, "trial_name=a b"),
        ({"trial_name": "x" * 129}, "at most 128"),
        ({"cluster__address": "head:6379:1"}, "cluster.address=head:6379:1: allowed: local, auto, or ip:port"),
        ({"cluster__address": "head:65536"}, "cluster.address=head:65536: allowed: local, auto, or ip:port"),
        ({"cluster__address": "head:0"}, "cluster.address=head:0: allowed: local, auto, or ip:port"),
        ({"sglang__port": 70000}, "sglang.port=70000"),
        ({"recover__keep_last": 0}, "recover.keep_last=0"),
        ({"saver__freq_steps": 0}, "saver.freq_steps=0"),
        ({"seed": -1}, "seed=-1"),
        ({"sglang__random_seed": 2**32}, "sglang.random_seed=4294967296: allowed: at least 0 and at most 2147483647"),
        ({"rollout__max_head_offpolicyness": -1}, "rollout.max_head_offpolicyness=-1: allowed: at least 0"),
    ],
)
def test_out_of_range(settings, said):
    with pytest.raises(ConfigError) as error:
        check(changed(ARITHMETIC, **settings))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("base", "settings", "said"),
    [
        (
            ARITHMETIC,
            {"rollout__max_head_offpolicyness": 2, "actor__recompute_logprob": True},
            "rollout.max_head_offpolicyness=2: 0 with actor.recompute_logprob=true",
        ),
        (
            ARITHMETIC,
            {"rollout__max_head_offpolicyness": 2, "trainer__adapter": "command", "trainer__command": "x"},
            "rollout.max_head_offpolicyness=2: 0 with trainer.adapter=command",
        ),
        (
            ARITHMETIC,
            {"actor__dynamic_sampling": 2, "total_train_steps": None, "actor__optimizer__lr_scheduler_type": "cosine"},
            "actor.optimizer.lr_scheduler_type=cosine: constant with actor.dynamic_sampling, or set total_train",
        ),
        (
            ARITHMETIC,
            {"rollout__retry_wait_initial": 20.0},
            "rollout.retry_wait_initial=20.0: at most rollout.retry_wait",
        ),
        (ARITHMETIC, {"gconfig__min_new_tokens": 27}, "gconfig.min_new_tokens=27: at most gconfig.max_new_tokens=26"),
        (
            ARITHMETIC,
            {"gconfig__min_new_tokens": 2},
            "gconfig.min_new_tokens=2: 0, or with actor.recompute_logprob=true",
        ),
        (ARITHMETIC, {"sglang__context_length": 26}, "sglang.context_length=26: at least 27"),
        (
            ARITHMETIC,
            {"sglang__max_total_tokens": 200},
            "sglang.context_length=256: at most sglang.max_total_tokens=200",
        ),
        (ARITHMETIC, {"sglang__max_total_tokens": 20}, "sglang.max_total_tokens=20: at least 27"),
        (ARITHMETIC, {"sglang__max_total_tokens": None}, "sglang.max_total_tokens=null: a number of tokens is needed"),
        (ARITHMETIC, {"actor__mb_spec__max_tokens_per_mb": 26}, "actor.mb_spec.max_tokens_per_mb=26: at least 27"),
        (GSM8K, {"actor__mb_spec__max_tokens_per_mb": 1023}, "=1023: at least 1024 (a prompt of 512 + gconfig.max_new"),
        (
            ARITHMETIC,
            {"train_dataset__max_items": 15},
            "train_dataset.max_items=15: at least train_dataset.batch_size=16",
        ),
        (ARITHMETIC, {"train_dataset__path": " "}, "train_dataset.path=' '"),
        (ARITHMETIC, {"rollout__episode": "agents.solve"}, "rollout.episode=agents.solve: allowed: module:function"),
        (ARITHMETIC, {"rollout__episode": "a:b", "chat__template": "none"}, "chat.template=none: not none"),
        (ARITHMETIC, {"rollout__episode": "a:b", "chat__system_prompt": "Be."}, "null with rollout.episode"),
        (ARITHMETIC, {"rollout__episode": "a:b", "chat__question_suffix": "!"}, "null with rollout.episode"),
        (ARITHMETIC, {"valid_dataset": None}, "evaluator.freq_steps=100: null without held-out data"),
        (ARITHMETIC, {"actor__kl_ctl": 0.1, "ref__path": ""}, "ref.path='': a model is needed, as actor.kl_ctl=0.1"),
        (ARITHMETIC, {"actor__kl_loss_coef": 0.1, "ref__path": ""}, "needed, as actor.kl_loss_coef=0.1"),
        (
            ARITHMETIC,
            {"actor__ppo_n_minibatches": 17},
            "actor.ppo_n_minibatches=17: at most train_dataset.batch_size=16",
        ),
        (ARITHMETIC, {"sglang__tp_size": 2}, "sglang.tp_size=2: 1 with sglang.device=cpu"),
        (ARITHMETIC, {"sglang__port": 65535, "sglang__n_servers": 2}, "sglang.port=65535: at most 65534"),
        (
            ARITHMETIC,
            {
                "sglang__port": 65535,
                "sglang__n_servers": 2,
                "trainer__adapter": "command",
                "trainer__command": "x",
                "trainer__rung": "servers",
            },
            "sglang.port=65535: at most 65534",
        ),
        (ARITHMETIC, {"sglang__extra_args": {"port": 1}}, "sglang.extra_args.port=1: set sglang.port instead"),
        (ARITHMETIC, {"sglang__extra_args": {"--tp-size": 2}}, "set sglang.tp_size instead"),
        (ARITHMETIC, {"sglang__extra_args": {"weight_version": "x"}}, "the launcher sets it itself"),
        (ARITHMETIC, {"cluster__detached": True}, "cluster.detached=True: false with cluster.address=local"),
        (ARITHMETIC, {"cluster__n_nodes": 2}, "cluster.n_nodes=2: allowed with cluster.address=local: 1"),
        (
            ARITHMETIC,
            {"cluster__n_nodes": 2, "cluster__address": "10.0.0.1:6379", "actor__weight_update_mode": "tensor"},
            "actor.weight_update_mode=tensor: disk or xccl with cluster.n_nodes=2: a handle of memory",
        ),
        (
            GSM8K,
            {"sglang__dp_size": 2, "sglang__gpu_fraction": 1.0, "actor__weight_update_mode": "xccl"},
            "actor.weight_update_mode=xccl: disk with sglang.dp_size=2",
        ),
        (
            GSM8K,
            {"sglang__gpu_fraction": 1.0, "actor__gpu_fraction": 1.0, "actor__weight_update_mode": "tensor"},
            "disk or xccl with sglang.gpu_fraction=1 and actor.gpu_fraction=1: on GPUs of their own",
        ),
        (
            ARITHMETIC,
            {"actor__device": "cuda", "actor__weight_update_mode": "xccl"},
            "actor.weight_update_mode=xccl: disk or tensor with sglang.device=cpu and actor.device=cuda",
        ),
        (
            GSM8K,
            {"actor__weight_update_mode": "xccl"},
            "disk or tensor with sglang.gpu_fraction=0.5 and actor.gpu_fraction=0.5: on one GPU",
        ),
        (
            GSM8K,
            {"cluster__n_gpus_per_node": 1, "sglang__gpu_fraction": 0.6},
            "; to share one, the two shares must sum to at most 1",
        ),
        (GSM8K, {"cluster__n_gpus_per_node": 0}, "cluster.n_gpus_per_node=0: 1 GPU and 2 CPUs are asked for: "),
        (GSM8K, {"cluster__n_gpus_per_node": 1, "sglang__n_servers": 2}, "1 GPU and 2 CPUs (2 servers)"),
        (GSM8K, {"sglang__tp_size": 2}, "sglang.gpu_fraction=0.5: 1 with sglang.tp_size=2"),
        (
            ARITHMETIC,
            {"actor__gather_dtype": "bfloat16"},
            "gather_dtype=bfloat16: float32 with actor.dtype=float32",
        ),
        (
            GSM8K,
            {"sglang__tp_size": 4, "sglang__gpu_fraction": 1.0, "cluster__n_gpus_per_node": 2},
            "cluster.n_gpus_per_node=2: 5 GPUs and 2 CPUs are asked for: 4 GPUs and 1 CPU (1 server)",
        ),
    ],
)
def test_contradictions(base, settings, said):
    with pytest.raises(ConfigError) as error:
        check(changed(base, **settings))
    assert said in str(error.value)


def test_all_problems_are_said_at_once():
    with pytest.raises(ConfigError) as error:
        check(changed(ARITHMETIC, gconfig__n_samples=1, sglang__mem_fraction_static=2.0, trial_name="a/b"))
    assert error.value.message.startswith("3 settings can't be used:")
    assert re.findall(r"^  (\S+?)=", error.value.message, re.MULTILINE) == [
        "trial_name",
        "gconfig.n_samples",
        "sglang.mem_fraction_static",
    ]
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        (ARITHMETIC, {"train_dataset__batch_size": 15}),  # nothing divides a batch: one trainer, servers share by load
        (ARITHMETIC, {"sglang__n_servers": 3}),
        (ARITHMETIC, {"actor__weight_update_mode": "xccl", "actor__dp_size": 2}),
        (ARITHMETIC, {"actor__optimizer__type": "torch.optim:SGD", "actor__dp_size": 2}),
        (CLUSTER, {"actor__weight_update_mode": "xccl"}),
        (ARITHMETIC, {"gconfig__max_new_tokens": 255}),
        (ARITHMETIC, {"valid_dataset": DatasetConfig(path="x", max_items=1)}),
        (ARITHMETIC, {"evaluator__freq_steps": None, "valid_dataset": None}),
        (ARITHMETIC, {"gconfig__top_k": -1, "gconfig__top_p": 1.0}),
        (ARITHMETIC, {"actor__kl_ctl": 0.1}),
        (GSM8K, {"cluster__n_gpus_per_node": 1}),
        (GSM8K, {"cluster__n_gpus_per_node": 4, "sglang__tp_size": 2, "sglang__gpu_fraction": 1.0}),
        (GSM8K, {"sglang__device": "auto", "actor__device": "auto", "cluster__n_gpus_per_node": 0}),
    ],
)
def test_what_looks_odd_and_is_sound(base, settings):
    assert find_problems(changed(base, **settings)) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"saver__freq_epochs": None, "recover__freq_steps": None}, "no checkpoint will be written before the end"),
        ({"total_train_steps": 10}, "recover.freq_steps=20 is never due in total_train_steps=10"),
        ({"total_train_steps": 10}, "evaluator.freq_steps=100 is never due"),
        ({"saver__freq_epochs": 2}, "saver.freq_epochs=2 is never due in total_train_epochs=1"),
        ({"total_train_steps": 5}, "actor.optimizer.warmup_steps=5"),
        ({"sglang__dtype": "bfloat16"}, "sglang.dtype=bfloat16 and actor.dtype=float32 differ"),
    ],
)
def test_notes(settings, said):
    config = changed(ARITHMETIC, **settings)
    assert find_problems(config) == []
    assert any(said in note for note in find_notes(config))
