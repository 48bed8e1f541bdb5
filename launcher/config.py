"""Every setting, its type and its one default. Values that differ by experiment stand in `conf/`.

Names are AReaL's where AReaL has the setting. Times are seconds, sizes tokens or bytes as named. The classes are
not frozen because OmegaConf merges into them; `launcher.__main__` turns the composed configuration into a
`RunConfig` once, and nothing changes it afterwards. Cross-field checks are in `launcher/checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MISSING: Any = "???"  # OmegaConf's marker: a value must be given


@dataclass
class ClusterConfig:
    fileroot: str = "outputs/grpo"
    n_nodes: int = 1
    n_gpus_per_node: int | None = None  # None: as many as this machine has
    address: str = "local"  # a running Ray cluster's ip:port, or "local" for one of our own


@dataclass
class DatasetConfig:
    """GSM8K records: `question`, and an `answer` that ends in `#### 42`."""

    path: str = MISSING  # hub name, .parquet, .jsonl, a folder of those
    name: str | None = None  # the hub's configuration name, e.g. "main"
    split: str = "train"
    batch_size: int = 16  # prompts per step
    shuffle: bool = True
    max_length: int | None = None  # prompts of more tokens are left out, and their number is said
    max_items: int | None = None  # the first n records only


@dataclass
class GenerationConfig:
    n_samples: int = 8
    max_new_tokens: int = 512
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens


@dataclass
class RolloutConfig:
    max_concurrent_rollouts: int = 16  # prompts in flight at once, n_samples requests each
    max_head_offpolicyness: int = 0  # 0: every token comes from the current weights
    request_timeout: float = 3600.0
    request_retries: int = 3  # attempts after the first, per request
    prompt_attempts: int = 5  # groups of one prompt that may fail in one step before the run halts
    retry_wait_initial: float = 0.2
    retry_wait_max: float = 10.0
    setup_timeout: float = 300.0  # a server must have answered a generation by then


@dataclass
class SGLangConfig:
    model_path: str = "${actor.path}"
    dtype: str = "${actor.dtype}"
    device: str = "auto"  # auto | cpu | cuda
    n_servers: int = 1
    tp_size: int = 1
    context_length: int | None = None
    mem_fraction_static: float = 0.8  # share of the GPU's memory for weights and KV cache; not used on CPU
    max_total_tokens: int | None = None  # size of the token pool; needed on CPU, where nothing else bounds it
    max_running_requests: int | None = None
    random_seed: int = "${seed}"  # type: ignore[assignment]  # an interpolation, an int once resolved
    attention_backend: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None  # None: a free one
    log_level: str = "info"
    num_cpus: float = 1.0
    gpu_fraction: float = 1.0  # share of a GPU that Ray books for one server (bookkeeping, not a limit)
    threads: int | None = None  # OMP_NUM_THREADS of a CPU server
    extra_args: dict[str, Any] = field(default_factory=dict)  # passed on as --key value, for anything not named here


@dataclass
class OptimizerConfig:
    type: str = "adamw"
    lr: float = 1.7e-5
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    lr_scheduler_type: str = "constant"  # constant | linear | cosine, after the warm-up
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    gradient_clipping: float = 1.0


@dataclass
class MicroBatchConfig:
    max_tokens_per_mb: int = 16384


@dataclass
class AdvNormConfig:
    """Group-normalised advantages: the mean is always the group's; the std is divided by only where asked."""

    std: bool = True
    eps: float = 1e-6


@dataclass
class ActorConfig:
    path: str = MISSING  # Hugging Face name or folder
    dtype: str = "bfloat16"  # arithmetic of forward and backward; master weights are always float32
    device: str = "auto"
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = False
    mb_spec: MicroBatchConfig = field(default_factory=MicroBatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    adv_norm: AdvNormConfig = field(default_factory=AdvNormConfig)
    eps_clip: float = 0.2
    eps_clip_higher: float | None = 0.28  # None: as eps_clip
    loss_aggregation: str = "token_mean"  # token_mean | sequence_mean
    kl_ctl: float = 0.0  # weight of the KL to the reference; > 0 loads the reference model
    recompute_logprob: bool = False  # old log-probs from the trainer instead of the server's
    weight_update_mode: str = "disk"  # disk (memory-backed) | tensor (over the wire, one node)
    weight_update_timeout: float = 120.0
    num_cpus: float = 1.0
    gpu_fraction: float = 1.0
    threads: int | None = None  # torch's intra-op threads on CPU


@dataclass
class RefConfig:
    path: str = "${actor.path}"
    dtype: str = "${actor.dtype}"


@dataclass
class RewardConfig:
    fn: str = "actors.reward:gsm8k_reward"  # module:function(completion=, answer=, prompt_id=, record=) -> float
    timeout: float = 15.0  # for one completion
    workers: int = 1


@dataclass
class FreqConfig:
    """Due when any of the given intervals has passed; null switches one off."""

    freq_epochs: int | None = None
    freq_steps: int | None = None
    freq_secs: int | None = None


@dataclass
class SaverConfig(FreqConfig):
    """Checkpoints to keep for good."""


@dataclass
class RecoverConfig(FreqConfig):
    """Checkpoints to resume from; older ones make room."""

    mode: str = "auto"  # auto: resume if there is one · on: there must be one · off: begin anew
    keep_last: int = 3


@dataclass
class EvaluatorConfig(FreqConfig):
    """Held-out accuracy: before the first step, after the last, and when due."""

    n_samples: int = 1  # sampled completions per prompt


@dataclass
class WandbConfig:
    mode: str = "disabled"  # online | offline | disabled
    project: str | None = None  # None: experiment_name
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class StatsLoggerConfig:
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class HardwareConfig:
    """The machine to plan for. null: as found. Given, the dry run plans for a machine that isn't this one."""

    gpu_name: str | None = None
    gpu_memory_gib: float | None = None


@dataclass
class RunConfig:
    experiment_name: str = MISSING
    trial_name: str = "trial0"
    seed: int = 1
    total_train_epochs: int = 1
    total_train_steps: int | None = None  # None: all steps of all epochs
    dry_run: bool = False  # resolve, validate, print the plan, start nothing
    tokenizer_path: str = "${actor.path}"
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    valid_dataset: DatasetConfig | None = None
    gconfig: GenerationConfig = field(default_factory=GenerationConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    saver: SaverConfig = field(default_factory=SaverConfig)
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
