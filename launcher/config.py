"""Every setting: its type, its one default, what it means and which values are allowed.

Values that differ by experiment stand in `conf/`. Names are AReaL's where AReaL has the setting. Times are seconds,
sizes tokens or bytes as named. The classes are not frozen because OmegaConf merges into them; `launcher.compose`
turns the composed configuration into a `RunConfig` once, and nothing changes it afterwards. Contradictions between
settings are in `launcher/checks.py`; `python -m scripts.document_settings` writes docs/configuration.md from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.settings import MISSING, AnyOf, Between, Matching, OneOf, part, same_as, setting

COUNT = Between(1)
NATURAL = Between(0)
POSITIVE = Between(0, open_low=True)
SHARE = Between(0, 1, open_low=True)
FRACTION = Between(0, 1, open_low=True, open_high=True)
BETA = Between(0, 1, open_high=True)
DEADLINE = Between(0, 86_400, open_low=True, why="as one of more than a day would never fire")
DEVICE = OneOf(("auto", "cpu", "cuda"))
DTYPE = OneOf(("float32", "bfloat16"))
FOLDER_NAME = Matching(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
    "a folder's name: at most 128 letters, digits, '.', '_' and '-', beginning with a letter or a digit",
)


@dataclass
class ClusterConfig:
    fileroot: str = setting("outputs/grpo", "folder under which checkpoints and logs of all runs stand")
    n_nodes: int = setting(1, "machines of the run", COUNT)
    n_gpus_per_node: int | None = setting(
        None, "GPUs of each machine that the run may book; null: as many as are found", NATURAL
    )
    address: str = setting(
        "local",
        "a running Ray cluster, or `local` for one of the run's own",
        Matching(r"local|auto|[^\s:/]+:\d{1,5}", "local, auto, or ip:port"),
    )


@dataclass
class DatasetConfig:
    """GSM8K records: `question`, and an `answer` that ends in `#### 42`."""

    path: str = setting(MISSING, "hub name, a .parquet or .jsonl file, or a folder of those")
    name: str | None = setting(None, "the hub's configuration name, e.g. main")
    split: str = setting("train", "the hub's split")
    batch_size: int = setting(16, "prompts per step", COUNT)
    shuffle: bool = setting(True, "a new order, drawn from the seed, in each epoch")
    max_length: int | None = setting(None, "prompts of more tokens are left out, and their number is said", COUNT)
    max_items: int | None = setting(None, "the first n records only", COUNT)


@dataclass
class GenerationConfig:
    n_samples: int = setting(
        8, "completions per prompt; an advantage is a reward against the mean of its group", Between(2)
    )
    max_new_tokens: int = setting(512, "a completion is cut here", COUNT)
    min_new_tokens: int = setting(0, "no completion ends before", NATURAL)
    temperature: float = setting(1.0, "of sampling; the log-probs that training uses are at it", POSITIVE)
    top_p: float = setting(1.0, "share of the probability that sampling draws from", SHARE)
    top_k: int = setting(-1, "tokens that sampling draws from; -1: all", AnyOf((OneOf((-1,)), COUNT)))


@dataclass
class RolloutConfig:
    max_concurrent_rollouts: int = setting(
        16, "prompts in flight at once, each with all its samples in one request", COUNT
    )
    max_head_offpolicyness: int = setting(0, "versions that a token's weights may be behind; 0: current weights only")
    request_timeout: float = setting(3600.0, "of one request: all samples of a prompt", DEADLINE)
    request_retries: int = setting(3, "attempts after the first, each for the samples still missing", NATURAL)
    retry_wait_initial: float = setting(0.2, "first wait of the exponential backoff; also its jitter", POSITIVE)
    retry_wait_max: float = setting(10.0, "longest wait of the backoff", POSITIVE)
    prompt_attempts: int = setting(3, "failed tries of one prompt in one step after which the run halts", COUNT)
    setup_timeout: float = setting(
        300.0,
        "a starting server must have answered a generation by then; rollouts wait this long for one",
        Between(10, 86_400, why="as SGLang can't start in less, and more than a day would never fire"),
    )


@dataclass
class SGLangConfig:
    model_path: str = same_as("actor.path", "what the server starts from; the trainer's weights follow")
    dtype: str = same_as("actor.dtype", "of weights and arithmetic in the server", DTYPE)
    device: str = setting("auto", "auto: a GPU where one is found, else the CPU", DEVICE)
    n_servers: int = setting(1, "servers that share the rollouts", COUNT)
    tp_size: int = setting(1, "GPUs over which one server's weights are split", COUNT)
    context_length: int | None = setting(None, "prompt + completion; null: the model's own", COUNT)
    mem_fraction_static: float = setting(
        0.8, "share of the GPU's free memory for weights and KV cache; not used on the CPU", FRACTION
    )
    max_total_tokens: int | None = setting(
        None, "size of the token pool; needed on the CPU, where nothing else bounds it", COUNT
    )
    max_running_requests: int | None = setting(None, "requests decoded together; null: SGLang's choice", COUNT)
    random_seed: int = same_as("seed", "SGLang's own seed", NATURAL)
    attention_backend: str | None = setting(None, "null: SGLang's choice (torch_native on the CPU)")
    host: str = setting("127.0.0.1", "address that the servers listen on")
    port: int | None = setting(None, "of the first server, the next ones following; null: free ones", Between(1, 65535))
    log_level: str = setting("info", "of llm_server-<i>.log", OneOf(("debug", "info", "warning", "error", "critical")))
    num_cpus: float = setting(1.0, "CPUs that Ray books for one server (bookkeeping, not a limit)", NATURAL)
    gpu_fraction: float = setting(1.0, "share of a GPU that Ray books for one server (bookkeeping, not a limit)", SHARE)
    threads: int | None = setting(None, "OMP_NUM_THREADS of a CPU server; null: the CPUs booked", COUNT)
    extra_args: dict[str, Any] = setting(
        {}, "SGLang arguments not named here, e.g. `+sglang.extra_args.watchdog_timeout=60`"
    )


@dataclass
class OptimizerConfig:
    type: str = setting("adamw", "the optimizer", OneOf(("adamw",)))
    lr: float = setting(1.7e-5, "learning rate after the warm-up", POSITIVE)
    weight_decay: float = setting(0.01, "decoupled, as AdamW's", NATURAL)
    beta1: float = setting(0.9, "decay of the first moment", BETA)
    beta2: float = setting(0.999, "decay of the second moment", BETA)
    eps: float = setting(1e-8, "added to the root of the second moment", POSITIVE)
    lr_scheduler_type: str = setting(
        "constant", "course of the learning rate after the warm-up", OneOf(("constant", "linear", "cosine"))
    )
    warmup_steps: int = setting(0, "steps of linear rise to lr", NATURAL)
    min_lr_ratio: float = setting(0.0, "where linear and cosine end, as a share of lr", Between(0, 1))
    gradient_clipping: float = setting(1.0, "largest norm of the gradient", POSITIVE)


@dataclass
class MicroBatchConfig:
    max_tokens_per_mb: int = setting(16384, "tokens, padding included, of one forward and backward pass", COUNT)


@dataclass
class AdvNormConfig:
    """Group-normalised advantages: the mean is always the group's."""

    std: bool = setting(True, "divide advantages by the standard deviation of their group")
    eps: float = setting(1e-6, "added to that standard deviation", POSITIVE)


@dataclass
class ActorConfig:
    path: str = setting(MISSING, "the model that learns: Hugging Face name or folder")
    dtype: str = setting("bfloat16", "of forward and backward; master weights are always float32", DTYPE)
    device: str = setting("auto", "auto: a GPU where one is found, else the CPU", DEVICE)
    attn_implementation: str = setting("sdpa", "as transformers names it")
    gradient_checkpointing: bool = setting(False, "compute activations twice instead of keeping them")
    mb_spec: MicroBatchConfig = part(MicroBatchConfig)
    optimizer: OptimizerConfig = part(OptimizerConfig)
    adv_norm: AdvNormConfig = part(AdvNormConfig)
    eps_clip: float = setting(0.2, "the ratio is clipped at 1 - eps_clip", BETA)
    eps_clip_higher: float | None = setting(0.28, "and at 1 + eps_clip_higher; null: as eps_clip", NATURAL)
    loss_aggregation: str = setting(
        "token_mean", "over which the loss is a mean", OneOf(("token_mean", "sequence_mean"))
    )
    kl_ctl: float = setting(0.0, "weight of the KL to the reference; above 0 loads the reference model", NATURAL)
    recompute_logprob: bool = setting(False, "old log-probs from the trainer instead of the server's")
    weight_update_mode: str = setting(
        "disk", "how weights reach the servers: memory-backed files, or over the wire", OneOf(("disk", "tensor"))
    )
    weight_update_timeout: float = setting(120.0, "a server must have confirmed new weights by then", DEADLINE)
    num_cpus: float = setting(1.0, "CPUs that Ray books for the trainer (bookkeeping, not a limit)", NATURAL)
    gpu_fraction: float = setting(1.0, "share of a GPU that Ray books for the trainer", SHARE)
    threads: int | None = setting(None, "torch's threads on the CPU; null: the CPUs booked", COUNT)


@dataclass
class RefConfig:
    path: str = same_as("actor.path", "the reference model of the KL")
    dtype: str = same_as("actor.dtype", "of the reference model", DTYPE)


@dataclass
class RewardConfig:
    fn: str = setting(
        "actors.reward:gsm8k_reward",
        "function(completion=, answer=, prompt_id=, record=) -> float, by import path",
        Matching(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "module:function, e.g. my_rewards.maths:score"),
    )
    timeout: float = setting(15.0, "of scoring one completion", DEADLINE)
    setup_timeout: float = setting(120.0, "until a scoring process has imported the function", DEADLINE)
    workers: int = setting(1, "processes that score", COUNT)


@dataclass
class FreqConfig:
    """Due when any of the given intervals has passed; null switches one off."""

    freq_epochs: int | None = setting(None, "due every n epochs; null: not by epochs", COUNT)
    freq_steps: int | None = setting(None, "due every n steps; null: not by steps", COUNT)
    freq_secs: int | None = setting(None, "due every n seconds; null: not by time", COUNT)


@dataclass
class SaverConfig(FreqConfig):
    """Checkpoints to keep for good."""


@dataclass
class RecoverConfig(FreqConfig):
    """Checkpoints to resume from; older ones make room."""

    mode: str = setting(
        "auto",
        "auto: resume if there is a checkpoint; on: there must be one; off: begin anew",
        OneOf(("auto", "on", "off")),
    )
    keep_last: int = setting(
        3,
        "newest checkpoints to resume from that stay, and up to three more to go back to from a collapse",
        COUNT,
    )
    memory: bool = setting(True, "keep the state after each step in memory too: a killed trainer loses no step")
    memory_share: float = setting(0.1, "of the time, at most; a state that takes longer isn't kept at each step", SHARE)


@dataclass
class EvaluatorConfig(FreqConfig):
    """Held-out accuracy: before the first step, after the last, and when due."""

    n_samples: int = setting(1, "sampled completions per held-out prompt", COUNT)


@dataclass
class WandbConfig:
    mode: str = setting("disabled", "where WandB's record goes", OneOf(("online", "offline", "disabled")))
    project: str | None = setting(None, "null: experiment_name")
    entity: str | None = setting(None, "WandB team or user; null: the login's")
    name: str | None = setting(None, "null: trial_name")
    group: str | None = setting(None, "null: none")
    tags: list[str] = setting([], "WandB tags")


@dataclass
class StatsLoggerConfig:
    wandb: WandbConfig = part(WandbConfig)


@dataclass
class HardwareConfig:
    """The machine to plan for. Given, a dry run plans for a machine that isn't this one."""

    gpu_name: str | None = setting(None, "null: as found")
    gpu_memory_gib: float | None = setting(None, "memory of one GPU; null: as found", POSITIVE)


@dataclass
class HealthConfig:
    """When a server or the trainer is hung. Time counts only while it was looked at and was given the CPU."""

    look_interval_s: float = setting(0.25, "between two looks at a process, its probes and its tokens", POSITIVE)
    probe_interval_s: float = setting(1.0, "between two generations of one token that ask a server for life", POSITIVE)
    probe_busy_interval_s: float = setting(5.0, "the same while it makes tokens for others", POSITIVE)
    silence_s: float = setting(3.0, "without an answer, a token or CPU time: one of three votes for a hang", POSITIVE)
    silence_factor: float = setting(10.0, "or so many of its usual answer times, where that is longer", POSITIVE)
    silence_max_s: float = setting(60.0, "but not longer than this", DEADLINE)
    lone_probe_factor: float = setting(5.0, "patience, times silence, where nothing but a probe waits", Between(1))
    proof_s: float = setting(10.0, "an answer or a token older than that proves nothing; nor does a look", POSITIVE)
    slow_factor: float = setting(2.5, "times slower than it used to be, and than its peers are: slow", Between(1))
    trainer_silence_s: float = setting(10.0, "a stopped trainer that doesn't answer for so long is hung", POSITIVE)
    trainer_factor: float = setting(10.0, "median steps without progress after which a trainer is hung", Between(1))
    trainer_min_s: float = setting(60.0, "but not before", POSITIVE)
    trainer_first_s: float = setting(1800.0, "the same before there is a median", DEADLINE)


@dataclass
class RewardHealthConfig:
    """When rewards say that something broke. Drops are in shares of the range of the rewards seen."""

    zero_alert_steps: int | None = setting(5, "steps in a row with only zeros: alert; null: never", COUNT)
    zero_breaker_steps: int | None = setting(10, "and: stop training and find the cause; null: never", COUNT)
    fall_threshold: float | None = setting(5.0, "standard errors of a fall that stops training; null: never", POSITIVE)
    fall_min_drop: float = setting(0.05, "no fall is smaller", Between(0, 1))
    baseline_steps: int = setting(50, "steps before a suspected onset that it is compared with", COUNT)
    warmup_steps: int = setting(15, "at least so many of them", Between(2))
    window_steps: int = setting(60, "how long ago an onset may lie", COUNT)
    noise_floor: float = setting(0.05, "least standard deviation that a step's mean reward is credited with", POSITIVE)
    outlier_clip: float = setting(4.0, "standard deviations that one step counts at most", POSITIVE)
    probation_steps: int = setting(50, "after a restore, with tighter thresholds", NATURAL)
    probation_factor: float = setting(0.8, "by which they are tighter", SHARE)
    canary_tolerance: float = setting(1e-6, "difference of a known answer's reward that is none", NATURAL)
    canary_silent_rounds: int = setting(2, "in a row in which one is not scored: broken", COUNT)
    canary_clear_rounds: int = setting(5, "in a row, all sound, after which a broken one is believed again", COUNT)
    verifier_patience_s: float = setting(600.0, "that a broken reward function may take to be mended", DEADLINE)


@dataclass
class GateConfig:
    """Which batches reach the optimizer. What is missing, not finite or of other weights never does, whatever is set.

    Distances are means of |server's - trainer's log-prob| over a batch, in nats. Measured at lr 3e-4 in float32:
    1e-7 for the same weights, 8e-4 and more for one version behind; in bfloat16 up to 2e-3 for the same, 4e-3 and
    more for ten behind, 0.2 and more for the first weights after 40 steps.
    """

    max_failed_share: float | None = setting(
        0.5, "of the requests: what comes through then is no fair sample; null: any", Between(0, 1)
    )
    distance_float32: float | None = setting(
        1e-5, "largest, where server and trainer both are float32; null: not asked", POSITIVE
    )
    distance_bfloat16: float | None = setting(3e-3, "largest, where one isn't; null: not asked", POSITIVE)
    distance_factor: float = setting(4.0, "or, in bfloat16, so many of the run's usual distances", Between(1))
    distance_unknown: float = setting(0.1, "largest before a usual one is known, and of older weights", POSITIVE)
    max_reward_jump: float | None = setting(
        0.5, "of the mean reward, as a share of the range of rewards; null: not asked", Between(0, 1)
    )
    max_share_jump: float | None = setting(
        0.5, "rise of the share of completions cut at the limit, or blank; null: not asked", Between(0, 1)
    )
    compared_rejections: int = setting(
        2, "batches in a row that a jump alone turns away; a change that stays is no accident", NATURAL
    )
    usual_steps: int = setting(20, "last steps whose medians are usual", COUNT)
    usual_min_steps: int = setting(5, "before which nothing is compared", COUNT)
    canaries: int = setting(6, "known answers scored with each batch; 0: none", NATURAL)


@dataclass
class AlertsConfig:
    """One message when an incident begins, one when it ends."""

    webhook: str | None = setting(None, "URL that gets each as JSON; null: none", Matching(r"https?://\S+", "a URL"))
    wandb: bool = setting(True, "as a WandB alert too, where WandB is on")
    timeout: float = setting(10.0, "of one message", DEADLINE)


@dataclass
class RestartConfig:
    """How often a repair is tried before the next larger one; a step further than ever before refills all."""

    window_s: float = setting(3600.0, "without a failure, after which earlier ones are forgotten", POSITIVE)
    wait_initial_s: float = setting(1.0, "before the second try; doubles with each", POSITIVE)
    wait_max_s: float = setting(60.0, "longest wait between two tries", POSITIVE)
    retry: int = setting(3, "tries of the smallest repair: weights loaded again, a batch dropped", COUNT)
    server: int = setting(3, "restarts of one server", COUNT)
    fleet: int = setting(2, "restarts of all servers", COUNT)
    restore: int = setting(3, "restores of the trainer; then the run halts", COUNT)


@dataclass
class RestoreConfig:
    """Which checkpoint is good enough to go back to."""

    good_after_steps: int = setting(10, "healthy steps after which a checkpoint is certified good", COUNT)
    onset_margin_steps: int = setting(2, "before the estimated onset that are not trusted either", NATURAL)
    same_place_steps: int = setting(20, "onsets no further apart are at the same place", NATURAL)
    same_place_collapses: int = setting(3, "this many at the same place halt the run", COUNT)
    begin_anew: bool = setting(True, "from the first weights, where no checkpoint is from before the onset")


@dataclass
class MemoryConfig:
    """What gives way when memory runs out, rung by rung; kept for the host and for later attempts."""

    mem_fraction_static: list[float] = setting([0.8, 0.7, 0.6, 0.5, 0.4], "of a GPU server, from the top down")
    min_concurrent_rollouts: int = setting(2, "max_concurrent_rollouts is halved down to it", COUNT)
    change_learning: bool = setting(False, "then max_new_tokens and n_samples too, which changes what is learned")
    min_new_tokens: int = setting(64, "max_new_tokens is halved down to it", COUNT)
    warn_before_s: float = setting(600.0, "a rise that reaches the limit within so long is reported", POSITIVE)
    sample_interval_s: float = setting(10.0, "between two looks at how much memory is used", POSITIVE)
    remember: bool = setting(True, "what gave way is kept below cluster.fileroot, and used by the next attempt")


@dataclass
class RunConfig:
    experiment_name: str = setting(MISSING, "folder name shared by an experiment's trials", FOLDER_NAME)
    trial_name: str = setting("trial0", "folder name of this run", FOLDER_NAME)
    seed: int = setting(1, "of data order, sampling and initialisation", NATURAL)
    total_train_epochs: int = setting(1, "passes over the data set", COUNT)
    total_train_steps: int | None = setting(None, "at most so many steps; null: all of all epochs", COUNT)
    dry_run: bool = setting(False, "resolve, validate, print the plan, start nothing")
    tokenizer_path: str = same_as("actor.path", "Hugging Face name or folder")
    cluster: ClusterConfig = part(ClusterConfig)
    hardware: HardwareConfig = part(HardwareConfig)
    train_dataset: DatasetConfig = part(DatasetConfig)
    valid_dataset: DatasetConfig | None = None
    gconfig: GenerationConfig = part(GenerationConfig)
    rollout: RolloutConfig = part(RolloutConfig)
    sglang: SGLangConfig = part(SGLangConfig)
    actor: ActorConfig = part(ActorConfig)
    ref: RefConfig = part(RefConfig)
    reward: RewardConfig = part(RewardConfig)
    saver: SaverConfig = part(SaverConfig)
    recover: RecoverConfig = part(RecoverConfig)
    evaluator: EvaluatorConfig = part(EvaluatorConfig)
    stats_logger: StatsLoggerConfig = part(StatsLoggerConfig)
    health: HealthConfig = part(HealthConfig)
    reward_health: RewardHealthConfig = part(RewardHealthConfig)
    gate: GateConfig = part(GateConfig)
    alerts: AlertsConfig = part(AlertsConfig)
    restart: RestartConfig = part(RestartConfig)
    restore: RestoreConfig = part(RestoreConfig)
    memory: MemoryConfig = part(MemoryConfig)
