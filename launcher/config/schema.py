"""Every setting: its type, its one default, what it means and which values are allowed.

Values that differ by experiment are in `conf/`. Names are AReaL's where AReaL has the setting. Times are seconds,
sizes tokens or bytes as named. `launcher.config.compose` turns what Hydra composed into a `RunConfig` once, checked by
`launcher.config.validation`, and nothing changes it afterwards. Beside this file are the
settings of supervision (`supervision.py`), of data and rewards (`data.py`), of the objective (`recipe.py`, `lora.py`,
`optimizer.py`), of what is shown (`reporting.py`) and of another project's trainer (`foreign.py`). Contradictions are
in `launcher/resources/config_checks.py`; `python -m scripts.document_settings` writes docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from launcher.base.addresses import CLUSTER_ADDRESS
from launcher.config.data import ChatConfig, DatasetConfig, FurtherConfig, HeldOutConfig, RewardConfig
from launcher.config.foreign import ForeignTrainerConfig
from launcher.config.lora import LoraConfig
from launcher.config.optimizer import OptimizerConfig
from launcher.config.recipe import RecipeConfig
from launcher.config.reporting import PriceConfig, StatsLoggerConfig, WatchConfig
from launcher.config.settings import (
    COUNT,
    DEADLINE,
    MISSING,
    NATURAL,
    POSITIVE,
    SEED,
    SHARE,
    TEMPERATURE,
    between,
    matching,
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

FRACTION = {"gt": 0, "lt": 1}
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
FOLDER_NAME = matching(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
    "a folder's name: at most 128 letters, digits, '.', '_' and '-', beginning with a letter or a digit",
)


@dataclass
class ClusterConfig:
    fileroot: str = setting("outputs/grpo", "folder below which the checkpoints and logs of all runs are written")
    n_nodes: int = setting(
        1, "number of machines of the run; a Ray cluster that is joined must have at least this many", COUNT
    )
    n_gpus_per_node: int | None = setting(
        None, "number of GPUs of each machine that the run may use; null: all that are found", NATURAL
    )
    address: str = setting(
        "local",
        "address of the Ray cluster to join; local: the run starts a cluster of its own on this machine",
        matching(*CLUSTER_ADDRESS),
    )
    placement: Literal["PACK", "SPREAD"] = setting(
        "PACK",
        "how Ray spreads the run; PACK: over as few nodes as possible; SPREAD: servers and trainer ranks over all "
        "nodes",
    )
    placement_timeout: float = setting(
        60.0, "longest wait for the cluster to have room for the complete run, in seconds", DEADLINE
    )
    detached: bool = setting(False, "the run outlives its driver; not with address=local (scripts/run_control.py)")
    lease_s: float = setting(
        15.0,
        "time without contact to its cluster after which a trainer, server or supervisor ends itself, in seconds; "
        "what is lost with a node is started again only after this time",
        between(
            5,
            600,
            why="since a shorter lease ends processes for a slow answer, and a longer one delays a repair",
        ),
    )
    metrics_port: int | None = setting(
        None,
        "port of Ray's metrics for Prometheus, open on every interface, where the run starts its own cluster; "
        "null: any free port",
        between(1, 65535),
    )
    node_wait_s: float = setting(
        600.0,
        "longest wait for a node with room for the trainer, or for the only server, in seconds; then the run halts",
        DEADLINE,
    )


@dataclass
class GenerationConfig:
    n_samples: int = setting(
        8, "completions per prompt; the advantage of one is its reward compared with the mean of this group", between(2)
    )
    max_new_tokens: int = setting(512, "upper limit of a completion's length, in tokens; a longer one is cut", COUNT)
    min_new_tokens: int = setting(0, "lower limit of a completion's length, in tokens", NATURAL)
    temperature: float = setting(
        1.0, "sampling temperature; training uses the log-probs at this temperature", TEMPERATURE
    )
    top_p: float = setting(
        1.0, "share of the probability mass that sampling draws from, the likeliest tokens first", SHARE
    )
    top_k: int = setting(
        -1, "number of likeliest tokens that sampling draws from; -1: all", {"ge": -1, "form": "-1 or at least 1"}
    )


@dataclass
class RolloutConfig:
    max_concurrent_rollouts: int = setting(
        16, "prompts in flight at the same time; one request asks for all samples of a prompt", COUNT
    )
    max_head_offpolicyness: int = setting(
        0,
        "upper limit of how many versions a token's weights may be behind the trainer's, which is also the number "
        "of batches made ahead; 0: none",
        NATURAL,
    )
    finish_s: float = setting(
        0.5,
        "time that completions made ahead get to finish before new weights are loaded, in seconds; unfinished "
        "ones are continued on the new weights",
        between(0, 86_400),
    )
    request_timeout: float = setting(
        3600.0, "deadline of one request, which asks for all samples of a prompt, in seconds", DEADLINE
    )
    stream_interval: int = setting(
        64,
        "number of tokens after which a server sends its part of a completion; another server continues after the "
        "last token sent",
        COUNT,
    )
    hedge_after_s: float | None = setting(
        0.5,
        "shortest silence of a server, without a token for any of its requests, before they move to another server, "
        "in seconds; null: they never move for a silence",
        POSITIVE,
    )
    hedge_factor: float = setting(
        3.0,
        "the silence after which a server's requests move to another one, as a multiple of the usual wait for this "
        "server's tokens; rollout.hedge_after_s is the least",
        between(1),
    )
    request_retries: int = setting(
        3, "attempts of a request after the first one; each asks only for the samples that are still missing", NATURAL
    )
    retry_wait_initial: float = setting(
        0.2,
        "first wait before a request is repeated, which doubles with each retry, in seconds; also the size of the "
        "random part of the wait; none after the first connection that breaks",
        POSITIVE,
    )
    retry_wait_max: float = setting(10.0, "longest wait before a request is repeated, in seconds", POSITIVE)
    prompt_attempts: int = setting(
        3,
        "failed attempts of one prompt in one step after which the step fails: where rewards were missing the trainer "
        "pauses, where completions were missing it is restarted",
        COUNT,
    )
    episode: str | None = setting(
        None,
        "function that plays samples of several turns, by import path (docs/data_rewards_episodes.md); null: each "
        "sample is one answer, scored by reward.fn",
        matching(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "module:function, e.g. my_agents:solve"),
    )
    episode_timeout: float = setting(
        600.0,
        "time that an episode's own code and tools may take, in seconds; the model's time is not counted",
        DEADLINE,
    )
    episode_workers: int = setting(1, "number of processes that play episodes; each plays many at the same time", COUNT)
    max_turns: int = setting(16, "upper limit of the model's answers in one episode; further answers are empty", COUNT)
    setup_timeout: float = setting(
        300.0,
        "longest time from a server's start to its first generated answer, in seconds",
        between(10, 86_400, why="since SGLang can't start in less, and a deadline of more than a day would never fire"),
    )


@dataclass
class SGLangConfig:
    model_path: str = same_as(
        "actor.path",
        "model folder or Hugging Face name that a server starts from; the trainer's weights are loaded afterwards",
    )
    dtype: Dtype = same_as("actor.dtype", "number format of the weights and the arithmetic in a server")
    device: Device = setting("auto", "device of the servers; auto: a GPU where one is found, else the CPU")
    n_servers: int = setting(1, "number of servers that share the rollouts", COUNT)
    drain_timeout: float = setting(
        60.0,
        "time that a server leaving the run gets to finish its requests, in seconds; other servers continue the "
        "unfinished ones",
        DEADLINE,
    )
    tp_size: int = setting(1, "number of GPUs over which one copy of a server's weights is split", COUNT)
    dp_size: int = setting(
        1, "number of copies of the weights behind one server's address, each over tp_size GPUs", COUNT
    )
    context_length: int | None = setting(
        None, "upper limit of prompt and completion together, in tokens; null: the model's own limit", COUNT
    )
    mem_fraction_static: float = setting(
        0.8, "share of the GPU's free memory for weights and KV cache; unused on the CPU", FRACTION
    )
    max_total_tokens: int | None = setting(
        None,
        "size of a server's token pool (KV cache), in tokens; required on the CPU, where nothing else limits it; "
        "null: set by mem_fraction_static",
        COUNT,
    )
    memory_limit_gib: float | None = setting(
        None,
        "memory limit of each process of a CPU server, enforced by the kernel (RLIMIT_DATA), in GiB; null: no limit",
        POSITIVE,
    )
    max_running_requests: int | None = setting(
        None, "upper limit of the sequences that a server decodes at the same time; null: SGLang's choice", COUNT
    )
    cuda_graph_max_bs_decode: int | None = setting(
        None, "largest decode batch that gets a CUDA graph, in sequences; null: all sequences in flight", COUNT
    )
    random_seed: int = same_as("seed", "seed of SGLang's sampling", SEED)
    attention_backend: str | None = setting(
        None, "SGLang's attention backend; null: SGLang's choice, torch_native on the CPU"
    )
    host: str = setting("127.0.0.1", "address that the servers listen on")
    port: int | None = setting(
        None, "port of the first server; the next servers take the following ports; null: free ports", between(1, 65535)
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] = setting(
        "info",
        "log level of the servers, written to llm_server-<i>.log",
    )
    num_cpus: float = setting(1.0, "number of CPUs that Ray reserves for one server; bookkeeping, not a limit", NATURAL)
    gpu_fraction: float = setting(
        1.0, "share of a GPU that Ray reserves for one server; bookkeeping, not a limit", SHARE
    )
    threads: int | None = setting(
        None, "number of threads of a CPU server (OMP_NUM_THREADS); null: as many as sglang.num_cpus", COUNT
    )
    extra_args: dict[str, Any] = setting(
        {}, "further SGLang arguments, by name, e.g. `+sglang.extra_args.watchdog_timeout=60`"
    )


@dataclass
class MicroBatchConfig:
    max_tokens_per_mb: int = setting(
        16384, "upper limit of one micro-batch, which is one forward and backward pass, in tokens with padding", COUNT
    )


@dataclass
class ActorConfig(LoraConfig, RecipeConfig):
    path: str = setting(MISSING, "model that is trained: a folder or a Hugging Face name")
    dtype: Dtype = setting(
        "bfloat16", "number format of the forward and backward pass; master weights are always float32"
    )
    device: Device = setting("auto", "device of the trainer; auto: a GPU where one is found, else the CPU")
    dp_size: int = setting(
        1, "number of trainer ranks; FSDP2 shards the model over as many GPUs (NCCL) or CPU processes (gloo)", COUNT
    )
    gather_dtype: Dtype = setting(
        "float32",
        "number format in which trainer ranks gather weights; bfloat16 halves the traffic and needs "
        "actor.dtype=bfloat16",
    )
    attn_implementation: str = setting("sdpa", "attention implementation, by its name in transformers")
    gradient_checkpointing: bool = setting(
        False, "compute activations again in the backward pass instead of keeping them: slower, with less memory"
    )
    mb_spec: MicroBatchConfig = part(MicroBatchConfig)
    optimizer: OptimizerConfig = part(OptimizerConfig)
    weight_update_mode: Literal["disk", "tensor", "xccl"] = setting(
        "disk",
        "way of new weights to the servers; disk: memory-backed files; tensor: tensors shared on one machine; "
        "xccl: a process group (NCCL, gloo on a CPU)",
    )
    weight_update_timeout: float = setting(
        120.0, "longest time that a server may take to load and confirm new weights, in seconds", DEADLINE
    )
    num_cpus: float = setting(
        1.0, "number of CPUs that Ray reserves for each trainer rank; bookkeeping, not a limit", NATURAL
    )
    gpu_fraction: float = setting(
        1.0, "share of a GPU that Ray reserves for each trainer rank; bookkeeping, not a limit", SHARE
    )
    threads: int | None = setting(None, "number of torch's threads on the CPU; null: as many as actor.num_cpus", COUNT)


@dataclass
class RefConfig:
    path: str = same_as("actor.path", "reference model of the KL term: a folder or a Hugging Face name")
    dtype: Dtype = same_as("actor.dtype", "number format of the reference model")


@dataclass
class FreqConfig:
    """Due when any of the given intervals has passed; null switches one off. What is due, each of them says."""

    freq_epochs: int | None = None
    freq_steps: int | None = None
    freq_secs: int | None = None


@dataclass
class SaverConfig(FreqConfig):
    """Checkpoints to keep for good."""

    freq_epochs: int | None = setting(
        None, "interval of the checkpoints that are kept for good, in epochs; null: not by epochs", COUNT
    )
    freq_steps: int | None = setting(
        None, "interval of the checkpoints that are kept for good, in steps; null: not by steps", COUNT
    )
    freq_secs: int | None = setting(
        None, "interval of the checkpoints that are kept for good, in seconds; null: not by time", COUNT
    )


@dataclass
class RecoverConfig(FreqConfig):
    """Checkpoints to resume from; older ones make room."""

    freq_epochs: int | None = setting(
        None, "interval of the checkpoints to resume from, in epochs; null: not by epochs", COUNT
    )
    freq_steps: int | None = setting(
        None, "interval of the checkpoints to resume from, in steps; null: not by steps", COUNT
    )
    freq_secs: int | None = setting(
        600,
        "interval of the checkpoints to resume from, in seconds: the most work that the loss of a machine costs; "
        "null: not by time",
        COUNT,
    )
    first_steps: int | None = setting(
        2,
        "step after which one additional checkpoint is written, to show early if the state can't be saved; null: none",
        COUNT,
    )
    mode: Literal["auto", "on", "off"] = setting(
        "auto",
        "where a run begins; auto: at its newest checkpoint, if there is one; on: there must be a checkpoint; "
        "off: at the beginning",
    )
    keep_last: int = setting(
        3,
        "number of newest checkpoints that are kept to resume from; the best one and up to three for a collapse "
        "are kept besides",
        COUNT,
    )
    url: str | None = setting(
        None,
        "address that every checkpoint is copied to while the run goes on, and fetched from if the disk has none: "
        "s3://bucket/folder, gs://…, file:///…; null: no copies",
    )
    url_timeout: float = setting(
        600.0,
        "longest wait for unfinished copies after the last step, and for the URL's answer before the first, in seconds",
        DEADLINE,
    )
    memory: bool = setting(
        True, "keep the state after each step in memory as well, so that a killed trainer loses no step"
    )
    memory_share: float = setting(
        0.1,
        "upper limit of the share of time that steps wait for the state kept in memory; where it would be "
        "exceeded, not every step's state is kept",
        SHARE,
    )


@dataclass
class EvaluatorConfig(FreqConfig):
    """Held-out accuracy: before the first step, after the last, and when due."""

    freq_epochs: int | None = setting(
        None, "interval of the evaluations on held-out data, in epochs; null: not by epochs", COUNT
    )
    freq_steps: int | None = setting(
        None, "interval of the evaluations on held-out data, in steps; null: not by steps", COUNT
    )
    freq_secs: int | None = setting(
        None, "interval of the evaluations on held-out data, in seconds; null: not by time", COUNT
    )
    n_samples: int = setting(1, "sampled completions per held-out prompt", COUNT)


@dataclass
class HardwareConfig:
    """The machine to plan for, each node of a cluster being one. Given `gpu_memory_gib`, a dry run plans for a machine
    that isn't this one: `cluster.n_nodes` of them with `cluster.n_gpus_per_node` GPUs."""

    auto: bool = setting(
        False,
        "fit the memory settings to the GPUs found; settings on the command line are kept (written as hardware=auto)",
    )
    gpu_name: str | None = setting(None, "name of the GPUs to plan for; null: as found")
    gpu_memory_gib: float | None = setting(None, "memory of one GPU to plan for, in GiB; null: as found", POSITIVE)
    n_cpus_per_node: int | None = setting(None, "number of CPUs of each machine to plan for; null: as found", COUNT)
    memory_gib_per_node: float | None = setting(
        None, "host memory of each machine to plan for, in GiB; null: as found", POSITIVE
    )


@dataclass
class SweepConfig:
    """Of `-m`: each combination of values is a separate run."""

    parallel: int | None = setting(
        None, "number of trials that run at the same time; null: as many as the machine has room for", COUNT
    )
    retry: bool = setting(
        False, "run trials again that halted for another reason than memory; finished trials are never run again"
    )


@dataclass
class WholeRunConfig(PriceConfig, DeadlineConfig):
    """Of the run as a whole: when it has to end, and what its machines cost."""


@dataclass
class RunConfig:
    __pydantic_config__: ClassVar[Mapping[str, object]] = {
        "extra": "forbid",
        "coerce_numbers_to_str": True,  # Hydra reads `trial_name=7` as a number
        "allow_inf_nan": False,
        "regex_engine": "python-re",  # pydantic's own has no lookahead
    }
    """Read by pydantic; sections take it over."""

    experiment_name: str = setting(MISSING, "name of the folder that all trials of an experiment share", FOLDER_NAME)
    trial_name: str = setting("trial0", "name of this run's folder below the experiment's", FOLDER_NAME)
    seed: int = setting(
        1, "seed of the order of the prompts; also of the servers' sampling, unless sglang.random_seed is set", SEED
    )
    total_train_epochs: int = setting(1, "number of passes over the training data", COUNT)
    total_train_steps: int | None = setting(
        None, "upper limit of the number of steps; null: all steps of all epochs", COUNT
    )
    dry_run: bool = setting(False, "check the settings and print the plan; nothing is started")
    tokenizer_path: str = same_as("actor.path", "tokenizer: a folder or a Hugging Face name")
    cluster: ClusterConfig = part(ClusterConfig)
    hardware: HardwareConfig = part(HardwareConfig)
    train_dataset: DatasetConfig = part(DatasetConfig)
    train_datasets: dict[str, FurtherConfig] = setting(
        {}, "further training data sets, by name, e.g. `+train_datasets.code.path=…`"
    )
    valid_dataset: HeldOutConfig | None = None
    valid_datasets: dict[str, FurtherConfig] = setting(
        {}, "further held-out data sets, by name; each has a curve of its own"
    )
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
    run: WholeRunConfig = part(WholeRunConfig)
    disk: DiskConfig = part(DiskConfig)
    memory: MemoryConfig = part(MemoryConfig)
    sweep: SweepConfig = part(SweepConfig)
    trainer: ForeignTrainerConfig = part(ForeignTrainerConfig)

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
