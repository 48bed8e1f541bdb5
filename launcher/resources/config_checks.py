"""Is a configuration possible at all? Pure: arguments in, problems out; nothing of the machine is looked at.

Ranges are declared beside each setting (`launcher/config/schema.py`); here are the contradictions between settings. All
problems are found and said together, since fixing them one start at a time is what makes a user give up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.base.errors import ConfigError
from launcher.base.listening import is_everywhere
from launcher.base.remote_url import problem_of
from launcher.config.schema import DatasetConfig, FreqConfig, RunConfig
from launcher.config.settings import settings_of, value_of
from launcher.config.supervision_checks import find_contradictions
from launcher.resources.placement_checks import find_misplaced

ARGUMENTS_OF_OURS = frozenset(
    {
        *("model_path", "dtype", "device", "tp_size", "dp_size", "context_length", "mem_fraction_static"),
        *("max_total_tokens", "max_running_requests", "random_seed", "attention_backend", "host", "port", "log_level"),
        *("weight_version", "enable_metrics", "nnodes", "node_rank", "dist_init_addr"),
    }
)
"""SGLang arguments that a named setting or the launcher itself gives: in `extra_args` one of the two would be lost."""

KEYS = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password"})
"""SGLang arguments that are secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProblem:
    """One thing that can't be: the key, the value it was given, and what would be allowed."""

    key: str
    given: object
    allowed: str

    def __str__(self) -> str:
        given = "null" if self.given is None else self.given
        return f"{self.key}={given}: {self.allowed}"


def check(config: RunConfig) -> None:
    """Raises ConfigError with every problem there is."""
    problems = find_problems(config)
    if len(problems) == 1:
        raise ConfigError(str(problems[0]), f"change {problems[0].key}")
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} settings can't be used:{listed}", "change the key that begins each line")


def find_problems(config: RunConfig) -> list[ConfigProblem]:
    """Everything that `check` refuses. Contradictions are looked for only among values that are in their range."""
    return list(_out_of_range(config)) or [
        *_what_this_version_cannot(config),
        *_lengths(config),
        *_data(config.train_dataset, "train_dataset"),
        *_data(config.valid_dataset, "valid_dataset"),
        *_timeouts(config),
        *_servers(config),
        *_doors(config),
        *_url(config),
        *_evaluation(config),
        *(
            ConfigProblem(key=key, given=given, allowed=allowed)
            for key, given, allowed in (*find_misplaced(config), *find_contradictions(config))
        ),
    ]


def find_notes(config: RunConfig) -> list[str]:
    """What is allowed, but perhaps not meant."""
    return [*_no_checkpoints(config), *_never_due(config), *_rounding(config)]


def _out_of_range(config: RunConfig) -> Iterator[ConfigProblem]:
    for setting in settings_of(RunConfig):
        value = value_of(config, setting.key)
        if setting.allowed is not None and value is not None and not setting.allowed.allows(value):
            yield ConfigProblem(key=setting.key, given=value, allowed=f"allowed: {setting.allowed} ({setting.meaning})")


def _what_this_version_cannot(config: RunConfig) -> Iterator[ConfigProblem]:
    staleness = config.rollout.max_head_offpolicyness
    if staleness != 0:
        yield ConfigProblem(
            key="rollout.max_head_offpolicyness",
            given=staleness,
            allowed="allowed: 0 (this version generates on the current weights only)",
        )
    actor = config.actor
    if actor.weight_update_mode == "tensor" and config.cluster.n_nodes > 1:
        yield ConfigProblem(
            key="actor.weight_update_mode",
            given="tensor",
            allowed=f"allowed with cluster.n_nodes={config.cluster.n_nodes}: disk (tensors travel within one machine)",
        )
    if config.cluster.n_nodes > 1 and config.cluster.address == "local":
        yield ConfigProblem(
            key="cluster.n_nodes",
            given=config.cluster.n_nodes,
            allowed="allowed with cluster.address=local: 1 (for more, give the ip:port of a running Ray cluster)",
        )
    if config.cluster.detached and config.cluster.address == "local":
        yield ConfigProblem(
            key="cluster.detached",
            given=True,
            allowed="false with cluster.address=local, a cluster that ends with the command that started it; for more "
            "start one (docs/clusters.md) and give its ip:port",
        )
    if actor.kl_ctl > 0 and not config.ref.path:
        yield ConfigProblem(
            key="ref.path", given=repr(config.ref.path), allowed=f"a model is needed, as actor.kl_ctl={actor.kl_ctl}"
        )


def _lengths(config: RunConfig) -> Iterator[ConfigProblem]:
    """A prompt of at least one token and a whole completion must fit into each of the things that hold them."""
    generation, sglang = config.gconfig, config.sglang
    if generation.min_new_tokens > generation.max_new_tokens:
        yield ConfigProblem(
            key="gconfig.min_new_tokens",
            given=generation.min_new_tokens,
            allowed=f"at most gconfig.max_new_tokens={generation.max_new_tokens}",
        )
    if generation.min_new_tokens > 0 and not config.actor.recompute_logprob:
        # SGLang masks the end token until then, so its log-probs are those of another distribution (measured: 1e-2).
        yield ConfigProblem(
            key="gconfig.min_new_tokens",
            given=generation.min_new_tokens,
            allowed="0, or with actor.recompute_logprob=true (the server's log-probs are not the model's then)",
        )
    prompt = config.train_dataset.max_length or 1
    needed = prompt + generation.max_new_tokens
    parts = f"a prompt of {prompt} + gconfig.max_new_tokens={generation.max_new_tokens}"
    for key in ("sglang.context_length", "sglang.max_total_tokens", "actor.mb_spec.max_tokens_per_mb"):
        room = value_of(config, key)
        if room is not None and room < needed:
            yield ConfigProblem(key=key, given=room, allowed=f"at least {needed} ({parts})")
    context, pool = sglang.context_length, sglang.max_total_tokens
    if context is not None and pool is not None and context > pool:
        yield ConfigProblem(
            key="sglang.context_length",
            given=context,
            allowed=f"at most sglang.max_total_tokens={pool}: no longer request fits the pool",
        )


def _data(dataset: DatasetConfig | None, key: str) -> Iterator[ConfigProblem]:
    if dataset is None:
        return
    if not dataset.path.strip():
        yield ConfigProblem(key=f"{key}.path", given=repr(dataset.path), allowed="a hub name, a file or a folder")
    if key == "train_dataset" and dataset.max_items is not None and dataset.max_items < dataset.batch_size:
        yield ConfigProblem(
            key=f"{key}.max_items",
            given=dataset.max_items,
            allowed=f"at least {key}.batch_size={dataset.batch_size}, or not one batch is whole",
        )


def _doors(config: RunConfig) -> Iterator[ConfigProblem]:
    """What would have a server listen to everybody, or show its keys. Their entry looks again, at what SGLang made of
    its arguments."""
    if is_everywhere(config.sglang.host):
        yield ConfigProblem(
            key="sglang.host",
            given=repr(config.sglang.host),
            allowed="127.0.0.1, or this machine's address in the cluster's own network (this is every interface)",
        )
    for key, value in config.sglang.extra_args.items():
        if len(key) > 1 and "host".startswith(key) and is_everywhere(str(value)):
            yield ConfigProblem(key=f"sglang.extra_args.{key}", given=value, allowed="one address, not every interface")
        if key.replace("-", "_") in KEYS:
            yield ConfigProblem(
                key=f"sglang.extra_args.{key}",
                given="(not shown)",
                allowed="nothing: each run makes its own keys, and arguments stand in the process list",
            )


def _url(config: RunConfig) -> Iterator[ConfigProblem]:
    url = config.recover.url
    if url is not None and (allowed := problem_of(url)):
        yield ConfigProblem(key="recover.url", given="(not shown)", allowed=allowed)


def _timeouts(config: RunConfig) -> Iterator[ConfigProblem]:
    rollout = config.rollout
    if rollout.retry_wait_initial > rollout.retry_wait_max:
        yield ConfigProblem(
            key="rollout.retry_wait_initial",
            given=rollout.retry_wait_initial,
            allowed=f"at most rollout.retry_wait_max={rollout.retry_wait_max}, which could never be waited else",
        )


def _servers(config: RunConfig) -> Iterator[ConfigProblem]:
    sglang = config.sglang
    if sglang.device == "cpu":
        yield from token_pool_on_cpu(config)
    for key in ("tp_size", "dp_size"):
        if sglang.device == "cpu" and (size := getattr(sglang, key)) > 1:
            yield ConfigProblem(key=f"sglang.{key}", given=size, allowed="1 with sglang.device=cpu")
    if sglang.port is not None and sglang.port + sglang.n_servers - 1 > 65535:
        yield ConfigProblem(
            key="sglang.port",
            given=sglang.port,
            allowed=f"at most {65536 - sglang.n_servers}, as {sglang.n_servers} servers take ports from it on",
        )
    for name, value in sglang.extra_args.items():
        plain = name.replace("-", "_").strip("_")
        if plain in ARGUMENTS_OF_OURS:
            instead = f"set sglang.{plain} instead" if hasattr(sglang, plain) else "the launcher sets it itself"
            yield ConfigProblem(key=f"sglang.extra_args.{name}", given=value, allowed=instead)


def token_pool_on_cpu(config: RunConfig) -> Iterator[ConfigProblem]:
    """On the CPU SGLang sizes its token pool by the whole host's memory where nobody says how large."""
    if config.sglang.max_total_tokens is None:
        needed = (config.train_dataset.max_length or 1) + config.gconfig.max_new_tokens
        yield ConfigProblem(
            key="sglang.max_total_tokens",
            given=None,
            allowed=f"a number of tokens is needed for a server on the CPU, at least {needed} (e.g. 20000)",
        )


def _evaluation(config: RunConfig) -> Iterator[ConfigProblem]:
    if config.valid_dataset is not None:
        return
    for name in _due_by(config.evaluator):
        yield ConfigProblem(
            key=f"evaluator.{name}",
            given=getattr(config.evaluator, name),
            allowed="null without held-out data; else set valid_dataset.path",
        )


def _no_checkpoints(config: RunConfig) -> Iterator[str]:
    if not list(_due_by(config.saver)) and not list(_due_by(config.recover)):
        yield (
            "no checkpoint will be written before the end (saver.freq_* and recover.freq_* are null): "
            "after a failure the run begins anew"
        )


def _never_due(config: RunConfig) -> Iterator[str]:
    steps, epochs = config.total_train_steps, config.total_train_epochs
    for section in ("saver", "recover", "evaluator"):
        frequency: FreqConfig = getattr(config, section)
        if steps is not None and frequency.freq_steps is not None and frequency.freq_steps > steps:
            yield f"{section}.freq_steps={frequency.freq_steps} is never due in total_train_steps={steps}"
        if frequency.freq_epochs is not None and frequency.freq_epochs > epochs:
            yield f"{section}.freq_epochs={frequency.freq_epochs} is never due in total_train_epochs={epochs}"
    warmup = config.actor.optimizer.warmup_steps
    if steps is not None and warmup >= steps:
        yield f"actor.optimizer.warmup_steps={warmup}: the learning rate never reaches lr in total_train_steps={steps}"


def _rounding(config: RunConfig) -> Iterator[str]:
    if config.sglang.dtype != config.actor.dtype:
        yield (
            f"sglang.dtype={config.sglang.dtype} and actor.dtype={config.actor.dtype} differ: "
            "so will the log-probs that sampling and training give the same tokens"
        )


def _due_by(frequency: FreqConfig) -> Iterator[str]:
    for name in ("freq_epochs", "freq_steps", "freq_secs"):
        if getattr(frequency, name) is not None:
            yield name
