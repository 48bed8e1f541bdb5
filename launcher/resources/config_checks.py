"""Checks a configuration by itself: values out of their range, settings that contradict each other. Pure.

Ranges are declared beside each setting (`launcher/config/schema.py`). The machine is not looked at: that is
`launcher.resources.preflight`. All problems are reported together, so that nobody fixes them one start at a time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterator

from launcher.base.addresses import is_every_interface, url_problem
from launcher.base.findings import Finding
from launcher.config.data import NO_TEMPLATE, WRITTEN_BY_US
from launcher.config.foreign import OWN
from launcher.config.lora import find_lora_problems
from launcher.config.recipe import find_recipe_problems
from launcher.config.schema import RunConfig
from launcher.config.settings import value_of, with_values
from launcher.config.supervision_checks import find_contradictions
from launcher.config.validation import NOT_SHOWN, config_problem, refuse, validated
from launcher.resources.placement import NodeResources, are_cpus_short, may_share_gpus, node_name, place
from launcher.resources.sglang_arguments import (
    BYPASSES,
    GPU_ARGUMENTS,
    MAY_BE_CUT,
    SECRET_ARGUMENTS,
    meant,
    plain_name,
)

SINGLE_ON_CPU = ("sglang.tp_size", "sglang.dp_size")
"""SGLang's copies on a CPU (dp) would meet on every interface, open to anybody; tp does not work there."""
USUAL_TOKEN_POOL = 20_000
"""Of conf=arithmetic_cpu: an example, where none is given."""
LAST_PORT = 65535
WAY = "actor.weight_update_mode"
WAYS = ("disk", "tensor", "xccl")
FREQUENCIES = ("freq_epochs", "freq_steps", "freq_secs")


def check(config: RunConfig, to_fit: Collection[str] = ()) -> None:
    """Raises ConfigError with every problem there is."""
    refuse(find_problems(config, to_fit))


def find_problems(config: RunConfig, to_fit: Collection[str] = ()) -> list[Finding]:
    """Everything that `check` refuses. Contradictions are looked for only among values that are in their range, and
    not of settings whose values are still to be fitted (`fitting`): they are checked again then."""
    if out_of_range := validated(dataclasses.asdict(config))[1]:
        return list(out_of_range.values())
    of_our_trainer = (
        ()
        if config.trainer.adapter != OWN
        else (
            *_lengths(config),
            *_other_settings(config),
            *find_lora_problems(config.actor),
            *find_recipe_problems(config.actor, batch_size=config.train_dataset.batch_size),
            *token_pool_on_cpu(config, config.sglang.device),
            *_unplaceable(config),
        )
    )
    contradictions = (*_unsupported(config), *of_our_trainer, *find_contradictions(config))
    listed = [config_problem(key, _given(config, key), allowed) for key, allowed in contradictions if key not in to_fit]
    return [*listed, *_addresses(config), *_extra_args(config)]


def _given(config: RunConfig, key: str) -> object:
    value = value_of(config, key)
    return repr(value) if isinstance(value, str) and not value.strip() else value


def _unsupported(config: RunConfig) -> Iterator[tuple[str, str]]:
    actor, cluster = config.actor, config.cluster
    if config.gconfig.top_k == 0:
        yield "gconfig.top_k", "allowed: -1 or at least 1"
    if allowed := beyond_last_port(config.sglang.port, config.sglang.n_servers):
        yield "sglang.port", allowed
    if config.rollout.max_head_offpolicyness > 0:
        for allowed in _against_staleness(config):
            yield "rollout.max_head_offpolicyness", f"0 {allowed}"
    yield from other_ways(config)
    if cluster.n_nodes > 1 and cluster.address == "local":
        yield (
            "cluster.n_nodes",
            "allowed with cluster.address=local: 1 (for more, give the ip:port of a running Ray cluster)",
        )
    if cluster.detached and cluster.address == "local":
        yield (
            "cluster.detached",
            "false with cluster.address=local, a cluster that ends with the command that started it; for more start "
            "one (docs/clusters.md) and give its ip:port",
        )
    if cluster.metrics_port is not None and cluster.address != "local":
        yield (
            "cluster.metrics_port",
            f"null with cluster.address={cluster.address}: a cluster's port of metrics is given where it is started "
            "(ray start --metrics-export-port=…)",
        )
    if actor.dynamic_sampling and config.total_train_steps is None and actor.optimizer.lr_scheduler_type != "constant":
        yield "actor.optimizer.lr_scheduler_type", "constant with actor.dynamic_sampling, or set total_train_steps"
    if actor.gather_dtype == "bfloat16" and actor.dtype != "bfloat16":
        yield "actor.gather_dtype", f"float32 with actor.dtype={actor.dtype}"
    for key in ("actor.kl_ctl", "actor.kl_loss_coef"):
        if value_of(config, key) > 0 and not config.ref.path:
            yield "ref.path", f"a model is needed, as {key}={value_of(config, key)}"


def beyond_last_port(port: int | None, n_servers: int) -> str:
    """What `sglang.port` may be at most, where so many servers would take ports beyond the last one; else ""."""
    if port is None or port + n_servers - 1 <= LAST_PORT:
        return ""
    return f"at most {LAST_PORT + 1 - n_servers}, as {n_servers} servers take ports from it on"


def _against_staleness(config: RunConfig) -> Iterator[str]:
    if config.trainer.adapter != OWN:
        yield f"with trainer.adapter={config.trainer.adapter}: that trainer has settings of its own"
        return
    if config.actor.recompute_logprob and not config.actor.use_decoupled_loss:
        # with min_new_tokens the decoupled loss is refused too
        other = "" if config.gconfig.min_new_tokens > 0 else "; or actor.use_decoupled_loss=true"
        yield f"with actor.recompute_logprob=true, which hides that older weights made the tokens{other}"


def _lengths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """A prompt of at least one token and a full completion must fit into each of the things that hold them."""
    generation, sglang = config.gconfig, config.sglang
    if generation.min_new_tokens > generation.max_new_tokens:
        yield "gconfig.min_new_tokens", f"at most gconfig.max_new_tokens={generation.max_new_tokens}"
    if generation.min_new_tokens > 0 and (config.actor.use_decoupled_loss or not config.actor.recompute_logprob):
        # SGLang masks the end token until then, so its log-probs are those of another distribution (measured: 1e-2).
        other = ", or with actor.recompute_logprob=true, not actor.use_decoupled_loss"
        if config.rollout.max_head_offpolicyness > 0:
            other = ""  # that loss is then the only one
        yield "gconfig.min_new_tokens", f"0{other} (the server's log-probs are not the model's then)"
    prompt = config.train_dataset.max_length or 1
    needed = prompt + generation.max_new_tokens
    for key in ("sglang.context_length", "sglang.max_total_tokens", "actor.mb_spec.max_tokens_per_mb"):
        room = value_of(config, key)
        if room is not None and room < needed:
            parts = f"a prompt of {prompt} + gconfig.max_new_tokens={generation.max_new_tokens}"
            yield key, f"at least {needed} ({parts})"
    context, pool = sglang.context_length, sglang.max_total_tokens
    if context is not None and pool is not None and context > pool:
        yield "sglang.context_length", f"at most sglang.max_total_tokens={pool}: no longer request fits the pool"


def _other_settings(config: RunConfig) -> Iterator[tuple[str, str]]:
    train, sglang, rollout = config.train_dataset, config.sglang, config.rollout
    for key, dataset in config.datasets().items():
        _, _, name = key.partition(".")
        if name and (not re.fullmatch(r"[A-Za-z]\w*", name) or name == "main"):
            further = "a further data set's name has letters, digits and _"
            yield f"{key}.path", f"{further}, and is not main, which is the first one's"
        elif not dataset.path.strip():
            yield f"{key}.path", "a hub name, a file or a folder"
    yield from _several_datasets(config)
    if config.chat.template == NO_TEMPLATE:
        for key in ("train_dataset.messages_key", "train_dataset.tools_key", "chat.system_prompt"):
            if value_of(config, key) is not None:
                yield key, f"null with chat.template={NO_TEMPLATE}: plain text has no messages"
    if rollout.episode is not None:
        yield from _with_episodes(config)
    for name in config.chat.template_kwargs.keys() & WRITTEN_BY_US:
        yield "chat.template_kwargs", f"variables of the template; {name} is the launcher's own"
    functions, weights = config.reward.fn.count("+") + 1, config.reward.weights
    if weights and (len(weights) != functions or not all(map(math.isfinite, weights))):
        yield "reward.weights", f"one finite number for each of the {functions} functions of reward.fn, or none"
    if train.max_items is not None and train.max_items < train.batch_size:
        yield "train_dataset.max_items", f"at least train_dataset.batch_size={train.batch_size}, or no batch is full"
    if rollout.retry_wait_initial > rollout.retry_wait_max:
        yield (
            "rollout.retry_wait_initial",
            f"at most rollout.retry_wait_max={rollout.retry_wait_max}, the longest wait between two tries",
        )
    for key in SINGLE_ON_CPU:
        if sglang.device == "cpu" and value_of(config, key) > 1:
            yield key, "1 with sglang.device=cpu"
    for name in FREQUENCIES:
        if config.valid_dataset is None and getattr(config.evaluator, name) is not None:
            yield f"evaluator.{name}", "null without held-out data; else set valid_dataset.path"


def _several_datasets(config: RunConfig) -> Iterator[tuple[str, str]]:
    train, valid = config.train_datasets, config.valid_datasets
    if valid and config.valid_dataset is None:
        yield "valid_datasets", "none without valid_dataset, which is the first held-out one"
    for name in train.keys() & valid.keys():
        if valid[name].reward_fn not in (None, train[name].reward_fn):
            yield f"valid_datasets.{name}.reward_fn", f"null, or that of train_datasets.{name}"
    if config.rollout.episode is not None and config.own_rewards():
        key = next(key for key, one in config.datasets().items() if getattr(one, "reward_fn", None) is not None)
        yield f"{key}.reward_fn", "null with rollout.episode: it alone can tell what its samples earn"


def _with_episodes(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.chat.template == NO_TEMPLATE:
        yield "chat.template", f"not {NO_TEMPLATE} with rollout.episode: its turns are written by a template"
    for key in ("chat.system_prompt", "chat.question_suffix"):
        if value_of(config, key) is not None:
            yield key, "null with rollout.episode, which writes its own messages"
    if config.reward.canaries is not None:
        yield "reward.canaries", "null with rollout.episode: it alone can tell what its samples earn"
    if config.actor.overlong_reward_penalty:
        yield "actor.overlong_reward_penalty", "false with rollout.episode: it is of a single answer's length"


def token_pool_on_cpu(config: RunConfig, device: str) -> Iterator[tuple[str, str]]:
    """On the CPU SGLang sizes its token pool by the memory of the entire host unless it is given a size."""
    if device == "cpu" and config.sglang.max_total_tokens is None:
        yield (
            "sglang.max_total_tokens",
            f"a number of tokens is needed for a server on the CPU, at least {_longest_sequence(config)} "
            f"(e.g. {usual_token_pool(config)})",
        )


def usual_token_pool(config: RunConfig) -> int:
    """One that this run can take."""
    return max(USUAL_TOKEN_POOL, _longest_sequence(config), config.sglang.context_length or 0)


def _longest_sequence(config: RunConfig) -> int:
    return (config.train_dataset.max_length or 1) + config.gconfig.max_new_tokens


def _addresses(config: RunConfig) -> Iterator[Finding]:
    host, url = config.sglang.host, config.recover.url
    if is_every_interface(host):
        allowed = "127.0.0.1, or this machine's address in the cluster's own network (this is every interface)"
        yield config_problem("sglang.host", repr(host), allowed)
    if url is not None and (allowed := url_problem(url)):
        yield config_problem("recover.url", NOT_SHOWN, allowed)


def _extra_args(config: RunConfig) -> Iterator[Finding]:
    """SGLang's entry point checks the address and the keys again, as SGLang understood its arguments."""
    for name, value in config.sglang.extra_args.items():
        key, ours = f"sglang.extra_args.{name}", meant(name)
        plain = plain_name(name)
        if len(plain) > 1 and MAY_BE_CUT.startswith(plain) and is_every_interface(str(value)):
            yield config_problem(key, value, "one address, not every interface")
        if ours in SECRET_ARGUMENTS:
            allowed = "nothing: each run makes its own keys, and arguments are visible in the process list"
            yield config_problem(key, NOT_SHOWN, allowed)
        elif ours in BYPASSES:
            must_be, why = BYPASSES[ours]
            if value not in (must_be, None, False):  # neither None nor False is handed on
                yield config_problem(key, value, f"leave it out: {why}")
        elif ours in GPU_ARGUMENTS:
            allowed = (
                "nothing: a server has the first sglang.tp_size × sglang.dp_size GPUs that Ray gives it, and the plan "
                "counts no others; for more of them raise sglang.tp_size"
            )
            yield config_problem(key, value, allowed)
        elif ours:
            allowed = f"set sglang.{ours} instead" if hasattr(config.sglang, ours) else "the launcher sets it itself"
            yield config_problem(key, value, allowed)


# ── the ways of new weights to the servers ──


def other_ways(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The key, and what would be allowed."""
    if why := _against_way(config):
        yield WAY, f"{' or '.join(accepted_ways(config))} with {why}"


def accepted_ways(config: RunConfig) -> tuple[str, ...]:
    """All that this run could take, whichever it has. Files are always among them."""
    runs = {way: with_values(config, {WAY: way}) for way in WAYS}
    return tuple(way for way, run in runs.items() if not _against_way(run))


def _against_way(config: RunConfig) -> str:
    """Why the run can't take the way that it has; "" if it can."""
    mode, nodes = config.actor.weight_update_mode, config.cluster.n_nodes
    if mode == "tensor" and nodes > 1:
        return f"cluster.n_nodes={nodes}: a handle of memory means nothing on another machine"
    if mode != "disk" and config.sglang.dp_size > 1:
        return f"sglang.dp_size={config.sglang.dp_size}: SGLang takes the others with dp_size 1 only"
    if mode == "tensor":
        return _against_handles(config)
    return _against_groups(config) if mode == "xccl" else ""


def _against_handles(config: RunConfig) -> str:
    """Why a CUDA handle's device number is another GPU in the server than in the trainer; "" if it isn't."""
    sglang, actor = config.sglang, config.actor
    if "cuda" not in (sglang.device, actor.device) or "cpu" in (sglang.device, actor.device):
        return ""
    if sglang.gpu_fraction + actor.gpu_fraction > 1:
        return (
            f"sglang.gpu_fraction={sglang.gpu_fraction:g} and actor.gpu_fraction={actor.gpu_fraction:g}: on GPUs of "
            "their own, where a handle names the wrong one"
        )
    return ""


def _against_groups(config: RunConfig) -> str:
    """Why no server can be in a group with the trainer; "" if it can."""
    sglang, actor = config.sglang, config.actor
    if sglang.device != actor.device:
        return f"sglang.device={sglang.device} and actor.device={actor.device}: a group is of one kind of device"
    if sglang.device != "cpu" and sglang.gpu_fraction + actor.gpu_fraction <= 1:
        return (
            f"sglang.gpu_fraction={sglang.gpu_fraction:g} and actor.gpu_fraction={actor.gpu_fraction:g}: on one "
            "GPU, where NCCL has no two ranks"
        )
    return ""


# ── settings that no machine of the described size can place ──


def _unplaceable(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The key, and what would be allowed. Only where the number of GPUs or CPUs of a node is given."""
    sglang, cluster, described = config.sglang, config.cluster, config.hardware.n_cpus_per_node
    over = sglang.tp_size * sglang.dp_size
    if over > 1 and sglang.gpu_fraction != 1:
        copies = f" × sglang.dp_size={sglang.dp_size}" if sglang.dp_size > 1 else ""
        allowed = f"1 with sglang.tp_size={sglang.tp_size}{copies}: a server over several GPUs reserves all of each"
        yield "sglang.gpu_fraction", allowed
        return
    per_node = cluster.n_gpus_per_node
    auto = "cpu" if per_node == 0 else "cuda"
    servers_on, trainer_on = (auto if one == "auto" else one for one in (sglang.device, config.actor.device))
    gpus = math.inf if per_node is None else per_node
    cpus = math.inf if described is None or cluster.address == "local" else described
    nodes = [NodeResources(name=node_name(number), gpus=gpus, cpus=cpus) for number in range(cluster.n_nodes)]
    placed = place(config, servers_on=servers_on, trainer_on=trainer_on, nodes=nodes)
    if placed.shortage is None:
        return
    allowed = f"{placed.shortage.message}: {placed.shortage.hint}"
    if are_cpus_short(placed.bundles, nodes):
        yield "hardware.n_cpus_per_node", allowed
    else:
        share = "; to share one, the two shares must sum to at most 1" if may_share_gpus(config) else ""
        yield "cluster.n_gpus_per_node", f"{allowed}{share}"


# ── notes ──


def find_notes(config: RunConfig) -> list[str]:
    """What is allowed, but perhaps not meant."""
    notes: list[str] = []
    if config.trainer.adapter != OWN:
        return notes
    steps, epochs = config.total_train_steps, config.total_train_epochs
    saves = [getattr(section, name) for section in (config.saver, config.recover) for name in FREQUENCIES]
    if all(one is None for one in (*saves, config.recover.first_steps)):
        notes.append(
            "no checkpoint will be written before the end (saver.freq_*, recover.freq_* and recover.first_steps are "
            "null): after a failure the run starts from the beginning"
        )
    for name, section in (("saver", config.saver), ("recover", config.recover), ("evaluator", config.evaluator)):
        if steps is not None and section.freq_steps is not None and section.freq_steps > steps:
            notes.append(f"{name}.freq_steps={section.freq_steps} is never due in total_train_steps={steps}")
        if section.freq_epochs is not None and section.freq_epochs > epochs:
            notes.append(f"{name}.freq_epochs={section.freq_epochs} is never due in total_train_epochs={epochs}")
    warmup = config.actor.optimizer.warmup_steps
    if steps is not None and warmup >= steps:
        never = f"the learning rate never reaches lr in total_train_steps={steps}"
        notes.append(f"actor.optimizer.warmup_steps={warmup}: {never}")
    if config.sglang.dtype != config.actor.dtype:
        notes.append(
            f"sglang.dtype={config.sglang.dtype} and actor.dtype={config.actor.dtype} differ: "
            "so will the log-probs that sampling and training give the same tokens"
        )
    return notes
