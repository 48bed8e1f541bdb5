"""Every setting: its type, its one default, what it means and which values are allowed.

Values that differ by experiment are in `conf/`. Names are AReaL's where AReaL has the setting. Times are seconds,
sizes tokens or bytes as named. The classes are not frozen because OmegaConf merges into them; `launcher.config.compose`
turns the composed configuration into a `RunConfig` once, and nothing changes it afterwards. Beside this file are the
settings of supervision (`supervision.py`), of data and rewards (`data.py`), of the objective (`recipe.py`, `lora.py`,
`optimizer.py`), of what is shown (`reporting.py`) and of another project's trainer (`foreign.py`). Contradictions are
in `launcher/resources/config_checks.py`; `python -m scripts.document_settings` writes docs/configuration.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.base.addresses import CLUSTER_ADDRESS
from launcher.config.data import ChatConfig, DatasetConfig, RewardConfig
from launcher.config.foreign import ForeignTrainerConfig
from launcher.config.lora import LoraConfig
from launcher.config.optimizer import OptimizerConfig
from launcher.config.recipe import RecipeConfig
from launcher.config.reporting import StatsLoggerConfig, WatchConfig
from launcher.config.settings import (
    COUNT,
    DEADLINE,
    MISSING,
    NATURAL,
    POSITIVE,
    SEED,
    SHARE,
    TEMPERATURE,
    AnyOf,
    Between,
    Matching,
    OneOf,
    part,
    same_as,
    setting,
)
from launcher.config.supervision import (
    AlertsConfig,
    DeadlineConfig,
    DiskConfig,
    GateConfig,
    HealthConfig,
    MemoryConfig,
    RecoveryConfig,
    RestartConfig,
    RestoreConfig,
    RewardHealthConfig,
)

FRACTION = Between(0, 1, open_low=True, open_high=True)
DEVICE = OneOf(("auto", "cpu", "cuda"))
DTYPE = OneOf(("float32", "bfloat16"))
FOLDER_NAME = Matching(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
    "a folder's name: at most 128 letters, digits, '.', '_' and '-', beginning with a letter or a digit",
)


@dataclass
class ClusterConfig:
    fileroot: str = setting("outputs/grpo", "folder for the checkpoints and logs of all runs")
    n_nodes: int = setting(1, "machines of the run; of a running cluster, so many must be there", COUNT)
    n_gpus_per_node: int | None = setting(
        None, "GPUs of each machine that the run may use; null: as many as are found", NATURAL
    )
    address: str = setting(
        "local", "a running Ray cluster, or `local` for one of the run's own", Matching(*CLUSTER_ADDRESS)
    )
    placement: str = setting(
        "PACK", "PACK: as few nodes as possible; SPREAD: servers and ranks over all nodes", OneOf(("PACK", "SPREAD"))
    )
    placement_timeout: float = setting(60.0, "the cluster must have room for the complete run by then", DEADLINE)
    detached: bool = setting(False, "the run outlives its driver; not with address=local (scripts/run_control.py)")
    lease_s: float = setting(
        15.0,
        "a trainer, server or supervisor without contact to its cluster for so long ends itself; "
        "what is lost with a node is started again only after that",
        Between(5, 600, why="as less would be a slow answer, and more a long wait for each lost node"),
    )
    metrics_port: int | None = setting(
        None,
        "port of Ray's metrics for Prometheus, on every interface, where the run starts its cluster; null: any",
        Between(1, 65535),
    )
    node_wait_s: float = setting(
        600.0, "for a node with room for the trainer, or for a single server; then the run halts", DEADLINE
    )


@dataclass
class GenerationConfig:
    n_samples: int = setting(
        8, "completions per prompt; an advantage is a reward against the mean of its group", Between(2)
    )
    max_new_tokens: int = setting(512, "a completion is cut here", COUNT)
    min_new_tokens: int = setting(0, "no completion ends before", NATURAL)
    temperature: float = setting(1.0, "of sampling; the log-probs that training uses are at it", TEMPERATURE)
    top_p: float = setting(1.0, "share of the probability that sampling draws from", SHARE)
    top_k: int = setting(-1, "tokens that sampling draws from; -1: all", AnyOf((OneOf((-1,)), COUNT)))


@dataclass
class RolloutConfig:
    max_concurrent_rollouts: int = setting(16, "prompts in flight at once, with all samples in one request", COUNT)
    max_head_offpolicyness: int = setting(
        0, "versions that a token's weights may be behind: so many batches are made ahead; 0: none", NATURAL
    )
    finish_s: float = setting(
        0.5,
        "before new weights are loaded, what is being made ahead may finish for so long; then it is continued on them",
        Between(0, 86_400),
    )
    request_timeout: float = setting(3600.0, "of one request: all samples of a prompt", DEADLINE)
    stream_interval: int = setting(
        64, "tokens after which a server sends what it has of a completion: another one continues from there", COUNT
    )
    hedge_after_s: float | None = setting(
        0.5,
        "without tokens for any of its requests a server is silent: another one is asked too; null: never",
        POSITIVE,
    )
    hedge_factor: float = setting(3.0, "and for so many times the wait that is usual with it", Between(1))
    request_retries: int = setting(3, "attempts after the first, each for the samples still missing", NATURAL)
    retry_wait_initial: float = setting(0.2, "first wait of the exponential backoff; also its jitter", POSITIVE)
    retry_wait_max: float = setting(10.0, "longest wait of the backoff", POSITIVE)
    prompt_attempts: int = setting(3, "failed tries of one prompt in one step after which the run halts", COUNT)
    episode: str | None = setting(
        None,
        "who plays a sample of several turns, by import path (docs/episodes.md); null: one answer, scored by reward.fn",
        Matching(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "module:function, e.g. my_agents:solve"),
    )
    episode_timeout: float = setting(
        600.0, "of an episode's own code and tools; the time that the model takes is not counted", DEADLINE
    )
    episode_workers: int = setting(1, "processes that play episodes, each many at a time", COUNT)
    max_turns: int = setting(16, "answers of the model in one episode; further ones are empty", COUNT)
    setup_timeout: float = setting(
        300.0,
        "a starting server must have answered a generation by then",
        Between(10, 86_400, why="as SGLang can't start in less, and more than a day would never fire"),
    )


@dataclass
class SGLangConfig:
    model_path: str = same_as("actor.path", "what the server starts from; the trainer's weights follow")
    dtype: str = same_as("actor.dtype", "of weights and arithmetic in the server", DTYPE)
    device: str = setting("auto", "auto: a GPU where one is found, else the CPU", DEVICE)
    n_servers: int = setting(1, "servers that share the rollouts", COUNT)
    drain_timeout: float = setting(
        60.0, "a server that is taken out of the run ends its requests until then; what it has not moves", DEADLINE
    )
    tp_size: int = setting(1, "GPUs over which one server's weights are split", COUNT)
    dp_size: int = setting(1, "copies of the weights behind one server's address, each over tp_size GPUs", COUNT)
    context_length: int | None = setting(None, "prompt + completion; null: the model's own", COUNT)
    mem_fraction_static: float = setting(
        0.8, "share of the GPU's free memory for weights and KV cache; not used on the CPU", FRACTION
    )
    max_total_tokens: int | None = setting(
        None, "size of the token pool; needed on the CPU, where nothing else bounds it", COUNT
    )
    memory_limit_gib: float | None = setting(
        None, "on the CPU: of each process of a server, kept by the kernel (RLIMIT_DATA); null: none", POSITIVE
    )
    max_running_requests: int | None = setting(None, "requests decoded together; null: SGLang's choice", COUNT)
    cuda_graph_max_bs_decode: int | None = setting(
        None, "sequences that have a CUDA graph when decoded together; null: all that are in flight", COUNT
    )
    random_seed: int = same_as("seed", "SGLang's own seed", SEED)
    attention_backend: str | None = setting(None, "null: SGLang's choice (torch_native on the CPU)")
    host: str = setting("127.0.0.1", "address that the servers listen on")
    port: int | None = setting(None, "of the first server, the next ones following; null: free ones", Between(1, 65535))
    log_level: str = setting("info", "of llm_server-<i>.log", OneOf(("debug", "info", "warning", "error", "critical")))
    num_cpus: float = setting(1.0, "CPUs that Ray reserves for one server (bookkeeping, not a limit)", NATURAL)
    gpu_fraction: float = setting(1.0, "share of a GPU that Ray reserves for one server (not a limit)", SHARE)
    threads: int | None = setting(None, "OMP_NUM_THREADS of a CPU server; null: the reserved CPUs", COUNT)
    extra_args: dict[str, Any] = setting(
        {}, "SGLang arguments not named here, e.g. `+sglang.extra_args.watchdog_timeout=60`"
    )


@dataclass
class MicroBatchConfig:
    max_tokens_per_mb: int = setting(16384, "tokens, padding included, of one forward and backward pass", COUNT)


@dataclass
class ActorConfig(LoraConfig, RecipeConfig):
    path: str = setting(MISSING, "the model that learns: Hugging Face name or folder")
    dtype: str = setting("bfloat16", "of forward and backward; master weights are always float32", DTYPE)
    device: str = setting("auto", "auto: a GPU where one is found, else the CPU", DEVICE)
    dp_size: int = setting(1, "trainer ranks: FSDP2 over so many GPUs (NCCL) or CPU processes (gloo)", COUNT)
    gather_dtype: str = setting(
        "float32", "in which trainer ranks gather weights; bfloat16: half the traffic, with actor.dtype=bfloat16", DTYPE
    )
    attn_implementation: str = setting("sdpa", "as transformers names it")
    gradient_checkpointing: bool = setting(False, "compute activations twice instead of keeping them")
    mb_spec: MicroBatchConfig = part(MicroBatchConfig)
    optimizer: OptimizerConfig = part(OptimizerConfig)
    weight_update_mode: str = setting(
        "disk",
        "how weights reach the servers: memory-backed files, tensors of this machine, or a group (NCCL, on a CPU gloo)",
        OneOf(("disk", "tensor", "xccl")),
    )
    weight_update_timeout: float = setting(120.0, "a server must have confirmed new weights by then", DEADLINE)
    num_cpus: float = setting(1.0, "CPUs that Ray reserves for each trainer rank (bookkeeping, not a limit)", NATURAL)
    gpu_fraction: float = setting(1.0, "share of a GPU that Ray reserves for each trainer rank", SHARE)
    threads: int | None = setting(None, "torch's threads on the CPU; null: the reserved CPUs", COUNT)


@dataclass
class RefConfig:
    path: str = same_as("actor.path", "the reference model of the KL")
    dtype: str = same_as("actor.dtype", "of the reference model", DTYPE)


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

    freq_secs: int | None = setting(
        600, "due every n seconds, the most that a lost machine costs; null: not by time", COUNT
    )
    first_steps: int | None = setting(
        2, "one besides after so many steps, which shows early what can't be saved; null: none", COUNT
    )
    mode: str = setting(
        "auto",
        "auto: resume if there is a checkpoint; on: there must be one; off: start from the beginning",
        OneOf(("auto", "on", "off")),
    )
    keep_last: int = setting(
        3,
        "newest checkpoints to resume from that stay; so do the best, and up to three to go back to from a collapse",
        COUNT,
    )
    url: str | None = setting(
        None,
        "where every checkpoint is copied to, beside the run, and fetched from where the disk is empty: "
        "s3://bucket/folder, gs://…, file:///…; null: nowhere",
    )
    url_timeout: float = setting(600.0, "after the last step, so long for the copies that are still missing", DEADLINE)
    memory: bool = setting(True, "keep the state after each step in memory too: a killed trainer loses no step")
    memory_share: float = setting(0.1, "of the time that steps wait for it, at most; else not each is kept", SHARE)


@dataclass
class EvaluatorConfig(FreqConfig):
    """Held-out accuracy: before the first step, after the last, and when due."""

    n_samples: int = setting(1, "sampled completions per held-out prompt", COUNT)


@dataclass
class HardwareConfig:
    """The machine to plan for, each node of a cluster being one. Given `gpu_memory_gib`, a dry run plans for a machine
    that isn't this one: `cluster.n_nodes` of them with `cluster.n_gpus_per_node` GPUs."""

    auto: bool = setting(
        False, "hardware=auto sets it: memory settings that fill the GPUs found, but for those on the command line"
    )
    gpu_name: str | None = setting(None, "null: as found")
    gpu_memory_gib: float | None = setting(None, "memory of one GPU; null: as found", POSITIVE)
    n_cpus_per_node: int | None = setting(None, "CPUs of each machine; null: as found", COUNT)
    memory_gib_per_node: float | None = setting(None, "host memory of each machine; null: as found", POSITIVE)


@dataclass
class SweepConfig:
    """Of `-m`: each combination of values is a separate run."""

    parallel: int | None = setting(None, "trials side by side; null: as many as this machine has room for", COUNT)
    retry: bool = setting(False, "run trials again that halted, other than for memory; FINISHED ones never are")


@dataclass
class RunConfig:
    experiment_name: str = setting(MISSING, "folder name shared by an experiment's trials", FOLDER_NAME)
    trial_name: str = setting("trial0", "folder name of this run", FOLDER_NAME)
    seed: int = setting(1, "of the order of prompts, and of the sampling of servers (sglang.random_seed)", SEED)
    total_train_epochs: int = setting(1, "passes over the data set", COUNT)
    total_train_steps: int | None = setting(None, "at most so many steps; null: all of all epochs", COUNT)
    keep_alive: bool = setting(
        False, "a small parent process begins the run again when its driver is killed (restart.driver)"
    )
    dry_run: bool = setting(False, "resolve, validate, print the plan, start nothing")
    tokenizer_path: str = same_as("actor.path", "Hugging Face name or folder")
    cluster: ClusterConfig = part(ClusterConfig)
    hardware: HardwareConfig = part(HardwareConfig)
    train_dataset: DatasetConfig = part(DatasetConfig)
    train_datasets: dict[str, Any] = setting({}, "further ones by name, e.g. `+train_datasets.code.path=…`")
    valid_dataset: DatasetConfig | None = None
    valid_datasets: dict[str, Any] = setting({}, "further held-out ones by name, each with its curve")
    chat: ChatConfig = part(ChatConfig)
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
    watch: WatchConfig = part(WatchConfig)
    health: HealthConfig = part(HealthConfig)
    reward_health: RewardHealthConfig = part(RewardHealthConfig)
    gate: GateConfig = part(GateConfig)
    alerts: AlertsConfig = part(AlertsConfig)
    restart: RestartConfig = part(RestartConfig)
    recovery: RecoveryConfig = part(RecoveryConfig)
    restore: RestoreConfig = part(RestoreConfig)
    run: DeadlineConfig = part(DeadlineConfig)
    disk: DiskConfig = part(DiskConfig)
    memory: MemoryConfig = part(MemoryConfig)
    sweep: SweepConfig = part(SweepConfig)
    trainer: ForeignTrainerConfig = part(ForeignTrainerConfig)

    # `train_datasets` and `valid_datasets` hold a FurtherConfig each; Hydra can't add one to a typed mapping.

    def datasets(self) -> dict[str, DatasetConfig]:
        """All, by the setting that names them, those to train on first."""
        found: dict[str, DatasetConfig] = {"train_dataset": self.train_dataset}
        found |= {f"train_datasets.{name}": one for name, one in self.train_datasets.items()}
        found |= {} if self.valid_dataset is None else {"valid_dataset": self.valid_dataset}
        return found | {f"valid_datasets.{name}": one for name, one in self.valid_datasets.items()}

    def own_rewards(self) -> dict[str, str]:
        """The reward functions of data sets that have one of their own, by the data sets' names."""
        further = [*self.valid_datasets.items(), *self.train_datasets.items()]
        return {name: one.reward_fn for name, one in further if one.reward_fn is not None}
