"""Estimates how much memory each process will take, item by item. Pure arithmetic; not limits.

States (weights, gradients, optimizer) are exact. Activations are what autograd keeps, computed from the shapes.
What a process takes beside its model was measured once on a machine without a GPU and is a constant here; the
CUDA context's size is a usual one, not measured.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.checkpoints.model_shape import BYTES, ModelShape
from launcher.config.optimizer import ADAMW
from launcher.config.schema import ActorConfig, RunConfig
from launcher.resources.cuda_graphs import graph_bytes, with_graphs

MIB, GIB = 2**20, 2**30

SERVER_HOST_BYTES = 2600 * MIB
"""HTTP process, scheduler and detokenizer of one server, idle, with the libraries they share counted once."""

TRAINER_HOST_BYTES = 1000 * MIB
AHEAD_TOKEN_BYTES = 100
"""Of a token that waits for its step: 68 as Python's objects (`sys.getsizeof`), the others its JSON in a state."""
PARKED_HOST_BYTES = 620 * MIB
"""Beside a trainer, with which it shares the libraries' pages: 486 MiB (PSS, smaps_rollup), and the trainer 597, while
the imports hid what transformers imports and doesn't use here; that is 118 MiB in each of the two."""
RAY_HOST_BYTES = 900 * MIB
"""Head processes and driver, without the dashboard."""

LOGITS_AT_ONCE = 2**26
"""As `actors.model.token_logprobs` has it, which can't be imported here without torch; a test holds them equal."""

BUCKET_BYTES = GIB
"""As `actors.serving.weight_buckets` has it; a test holds them equal."""

CUDA_CONTEXT_BYTES = 600 * MIB
"""A usual value, not a reading: nothing was measured on a GPU."""


class Item(NamedTuple):
    """One line of an account: what takes how many bytes, and how that was found."""

    what: str
    bytes: int
    how: str


def server_on_gpu(config: RunConfig, shape: ModelShape, gpu_memory: int) -> tuple[Item, ...]:
    """One GPU of one server. SGLang takes `mem_fraction_static` of the memory that is free when it starts, for its
    weights and the KV cache, and works in what it leaves (sglang 0.5.17, `_profile_available_bytes`)."""
    sglang = config.sglang
    weights = shape.parameters * BYTES[sglang.dtype] // sglang.tp_size
    cache = kv_cache_bytes(config, shape, gpu_memory)
    tokens = cache // shape.kv_bytes_on_each(sglang.dtype, sglang.tp_size)
    return (
        Item("weights", weights, _each(shape.parameters, BYTES[sglang.dtype], sglang.tp_size)),
        Item("KV cache", cache, f"{tokens:,} tokens, by mem_fraction_static={sglang.mem_fraction_static:g}"),
        Item("working memory", _server_working_bytes(gpu_memory), "prefill; SGLang's own estimate"),
        Item("CUDA graphs", graph_bytes(config, prefill_chunk(gpu_memory)), _graphs_of(config)),
        *_received(config, shape),
        Item("CUDA context", CUDA_CONTEXT_BYTES, "usual"),
    )


def kv_cache_bytes(config: RunConfig, shape: ModelShape, gpu_memory: int) -> int:
    """What is left for the KV cache on each GPU of a server; 0 or less where the weights alone don't fit."""
    sglang = config.sglang
    left = int(gpu_memory * sglang.mem_fraction_static) - shape.parameters * BYTES[sglang.dtype] // sglang.tp_size
    if sglang.max_total_tokens is None:
        return left
    return min(left, sglang.max_total_tokens * shape.kv_bytes_on_each(sglang.dtype, sglang.tp_size))


def _graphs_of(config: RunConfig) -> str:
    return f"up to {with_graphs(config).cuda_graph_max_bs_decode} sequences; SGLang's own estimate"


def prefill_chunk(gpu_memory: int) -> int:
    """Tokens of a prefill, which follow the GPU's memory (sglang 0.5.17, `_handle_gpu_memory_settings`)."""
    limits = ((35, 2048), (60, 4096), (160, 8192))
    return next((tokens for gib, tokens in limits if gpu_memory < gib * GIB), 16384)


def _server_working_bytes(gpu_memory: int) -> int:
    """As SGLang reserves it: 512 MiB and 1.5 MiB for each token of a prefill chunk."""
    return int((512 + 1.5 * prefill_chunk(gpu_memory)) * MIB)


def server_on_cpu(config: RunConfig, shape: ModelShape) -> tuple[Item, ...]:
    """One server in the host's memory. Its token pool is `max_total_tokens`, which nothing else bounds."""
    sglang = config.sglang
    tokens = sglang.max_total_tokens or 0
    pool = tokens * shape.kv_bytes_per_token(sglang.dtype)
    weights = shape.parameters * BYTES[sglang.dtype]
    return (
        Item("weights", weights, _each(shape.parameters, BYTES[sglang.dtype])),
        Item("KV cache", pool, f"{tokens:,} tokens, by max_total_tokens"),
        Item("processes", SERVER_HOST_BYTES, "HTTP, scheduler, detokenizer; measured"),
        *_received(config, shape),
    )


def _received(config: RunConfig, shape: ModelShape) -> tuple[Item, ...]:
    """What a server takes beside its weights while it loads new ones (sglang 0.5.17, `WeightUpdater`): of a bucket that
    comes over a group, empty tensors and the flat one. One that it has a handle of it reads where it is."""
    if config.actor.weight_update_mode == "xccl":
        return (Item("new weights", 2 * _bucket_bytes(config, shape), "a bucket of them, twice, while they load"),)
    return ()


def _version_bytes(config: RunConfig, shape: ModelShape) -> int:
    return shape.parameters * BYTES[config.sglang.dtype]


def _bucket_bytes(config: RunConfig, shape: ModelShape) -> int:
    largest = shape.vocab * shape.hidden * BYTES[config.sglang.dtype]
    return min(_version_bytes(config, shape), max(BUCKET_BYTES, largest))


class Sent(NamedTuple):
    """Bytes of new weights on rank 0's own device and, where that is a GPU, in the host's memory."""

    on_device: int
    in_host: int


def sent(config: RunConfig, shape: ModelShape, *, on_gpu: bool) -> Sent:
    """What rank 0 holds of new weights, beside files, while servers load them: one version. It is given up when all
    have it, but a server that is late, or was restarted, loads it beside the next gradients.

    One rank makes a bucket's tensors before it copies them into the bucket; of several ranks the weights are gathered
    in the host's memory, and handles are of what is there.
    """
    actor, version = config.actor, _version_bytes(config, shape)
    if actor.weight_update_mode == "disk":
        return Sent(0, 0)
    if actor.dp_size == 1:
        found = Sent(version + _bucket_bytes(config, shape), 0)
    elif actor.weight_update_mode == "xccl":
        found = Sent(version, version)
    else:
        found = Sent(0, 2 * version)
    return found if on_gpu else Sent(sum(found), 0)


def trainer(config: RunConfig, shape: ModelShape, *, on_gpu: bool, rank: int = 0) -> tuple[Item, ...]:
    """One rank of the trainer. AdamW on float32 masters takes 16 bytes for each parameter (4 weights, 4 gradients, 8
    moments; Rajbhandari et al. 2020, "ZeRO", section 3.1), and bfloat16 arithmetic 2 more for its copy of the weights.
    Rank 0 sends the weights to the servers.

    Over several ranks each of the three is divided by their number (ZeRO stage 3, which FSDP2's `fully_shard` is). The
    copy is not: autocast makes it of each layer that is gathered, and may keep it until the pass is over. What is
    gathered in bfloat16 (actor.gather_dtype) needs none.
    """
    actor, parameters = config.actor, shape.parameters
    trained, ranks = learning(actor, shape), actor.dp_size
    own = BYTES[actor.dtype] if actor.use_lora and ranks == 1 else 4
    over = f" over {ranks} ranks" if ranks > 1 else ""
    items = [
        Item("weights", own * parameters // ranks, _each(parameters, own) + over),
        *([Item("adapters", 4 * trained // ranks, _each(trained, 4) + over)] if actor.use_lora else []),
        Item("gradients", 4 * trained // ranks, _each(trained, 4) + over),
        Item("optimizer", 8 * trained // ranks, _each(trained, 8) + f"{over}, {_moments(actor)}"),
    ]
    if ranks > 1:
        items.append(_gathered(actor, shape))
    if not on_gpu and (kept := kept_state_bytes(config, shape)):
        items.append(Item("state before the batch", kept, "for actor.ppo_n_minibatches, to go back to"))
    if not on_gpu and (ahead := ahead_bytes(config)):
        why = "of rollout.max_head_offpolicyness and actor.dynamic_sampling, at gconfig.max_new_tokens"
        items.append(Item("rollouts ahead", ahead, why))
    if actor.dtype != "float32" and own == 4 and not (ranks > 1 and actor.gather_dtype == "bfloat16"):
        items.append(Item(f"{actor.dtype} copy", 2 * parameters, _each(parameters, 2)))
    if actor.needs_reference:
        reference = BYTES[config.ref.dtype]
        items.append(Item("reference", reference * parameters // ranks, _each(parameters, reference) + over))
    if rank == 0 and (new := sent(config, shape, on_gpu=on_gpu).on_device):
        items.append(Item("new weights", new, f"in {config.sglang.dtype}, while servers load them"))
    tokens = f"{actor.mb_spec.max_tokens_per_mb:,} tokens"
    how = ", checkpointed" if actor.gradient_checkpointing else ""
    items.append(Item("activations", activation_bytes(actor, shape), tokens + how))
    items.append(Item("logits", logit_bytes(actor, shape), f"of {shape.vocab:,} tokens, in pieces"))
    if beyond := summing_bytes(actor, shape):
        items.append(Item("embedding's gradient", beyond, "its parts while they are summed, beyond what is gone then"))
    process = Item("process", TRAINER_HOST_BYTES, "torch, transformers, Ray; measured")
    context = Item("CUDA context", CUDA_CONTEXT_BYTES, "usual")
    return (*items, context if on_gpu else process)


def _moments(actor: ActorConfig) -> str:
    return (
        "AdamW's moments"
        if actor.optimizer.type == ADAMW
        else f"as AdamW's: what {actor.optimizer.type} keeps isn't known"
    )


def kept_state_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Of a rank, in the host's memory: weights and moments before a batch with several optimizer steps."""
    actor = config.actor
    return 12 * learning(actor, shape) // actor.dp_size if actor.ppo_n_minibatches > 1 else 0


def ahead_bytes(config: RunConfig) -> int:
    """Completions beyond a batch, which wait for their step or are left out of it, in the host's memory: ids and
    log-probs as Python's objects, their JSON."""
    batches = config.rollout.max_head_offpolicyness + (config.actor.dynamic_sampling or 1) - 1
    samples = batches * config.train_dataset.batch_size * config.gconfig.n_samples
    return samples * config.gconfig.max_new_tokens * AHEAD_TOKEN_BYTES


def checkpoint_bytes(actor: ActorConfig, shape: ModelShape) -> int:
    """Weights to serve, and for each parameter that learns its float32 master (4) and AdamW's two moments (8)."""
    return shape.parameters * BYTES[actor.dtype] + learning(actor, shape) * (4 + 8)


def learning(actor: ActorConfig, shape: ModelShape) -> int:
    """Parameters that learn: all, or with actor.use_lora those of the adapters."""
    return shape.adapter_parameters(actor.adapted, actor.lora_rank) if actor.use_lora else shape.parameters


def standby_trainer(config: RunConfig, shape: ModelShape, *, on_gpu: bool) -> tuple[Item, ...]:
    """A parked rank, in the host's memory: with a GPU it has the libraries, without one its first weights too."""
    process = Item("process", PARKED_HOST_BYTES, "torch, transformers, Ray; measured")
    if on_gpu:
        return (process,)
    each, ranks = 4 * (2 if config.actor.needs_reference else 1), config.actor.dp_size
    over = f" over {ranks} ranks" if ranks > 1 else ""
    return (Item("weights", each * shape.parameters // ranks, _each(shape.parameters, each) + over), process)


def _gathered(actor: ActorConfig, shape: ModelShape) -> Item:
    """What a rank holds unsharded for a while: the embeddings and the gradient of the head, the layer that computes and
    the next one with their gradients (Zhao et al. 2023, "PyTorch FSDP", sections 3 and 4: a layer is gathered before it
    computes, the next one prefetched, and its gradients are reduced when it is done)."""
    size = _gathered_size(actor)
    whole = shape.outside_layers + shape.vocab * shape.hidden + 4 * shape.layer
    return Item("gathered", size * whole, _each(whole, size) + ", with gradients")


def _gathered_size(actor: ActorConfig) -> int:
    """Of several ranks; one has its weights in float32."""
    return BYTES[actor.gather_dtype if actor.dp_size > 1 else "float32"]


def activation_bytes(actor: ActorConfig, shape: ModelShape) -> int:
    """What autograd keeps of one micro-batch, after Korthikanti et al. 2022 ("Reducing Activation Recomputation"),
    section 4, with this family's gated MLP and grouped heads, and an attention that keeps no score matrix.

    Per token and layer: the inputs of two norms (and their float32 copies), of q/k/v, o, gate/up and down, the rotated
    q, k, v, and gate, up, their product and the activation. Checkpointed: each layer's float32 input, and all
    of one layer. Of small models of each kind it is 0.94 (Gemma 3) to 1.23 times what
    `torch.autograd.graph.saved_tensors_hooks` counts.
    """
    tokens, size = actor.mb_spec.max_tokens_per_mb, BYTES[actor.dtype]
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    numbers = 6 * shape.hidden + 2 * (q + 2 * kv) + q + 4 * shape.intermediate
    norms = 4 * 2 * 2 * shape.hidden
    layer = tokens * (size * numbers + norms)
    if not actor.gradient_checkpointing:
        return shape.layers * layer
    return shape.layers * tokens * 4 * shape.hidden + layer


def summing_bytes(actor: ActorConfig, shape: ModelShape) -> int:
    """What the parts of the head's and a tied embedding's gradient take beside the one that stays, as far as it is more
    than activations, logits, what is gathered and the copy of the weights, which are not all there then. Counted with
    `MemTracker`.

    While the head is differentiated: the sum over the pieces so far and the next one, beside its logits or, these gone,
    the new sum; checkpointed another cast of the head. At the end, tied: float32 as head, as embedding, and both. Of
    several ranks: the embeddings and their gradients as they were gathered, of a tied one three, or the gradients and
    their copy in float32, in which ranks add them up.
    """
    if actor.use_lora:
        return 0
    size, embedding, logits = BYTES[actor.dtype], shape.vocab * shape.hidden, logit_bytes(actor, shape)
    gathered = _gathered_size(actor)
    is_cast = size != 4 and gathered == 4
    kept, copy = activation_bytes(actor, shape), size * shape.parameters if is_cast else 0
    planned = kept + copy + logits
    if actor.gradient_checkpointing:
        kept = shape.layers * actor.mb_spec.max_tokens_per_mb * 4 * shape.hidden
        copy = size * embedding if is_cast else 0
    at_head = kept + copy + max(logits + 2 * size * embedding, logits // 4 + 3 * size * embedding)
    at_end = 3 * 4 * embedding if shape.tied else 0
    if actor.dp_size > 1:
        planned += _gathered(actor, shape).bytes
        at_head += gathered * (shape.outside_layers + 2 * shape.layer)
        matrices = 1 if shape.tied else 2
        at_end = max(4 * gathered, matrices * (gathered + 4)) * embedding + (gathered + 4) * shape.layer
    return max(0, at_head - planned, at_end - planned)


def logit_bytes(actor: ActorConfig, shape: ModelShape) -> int:
    """One piece of them: logits in the model's dtype and in float32, and probabilities; later the probabilities, the
    gradient in float32, and in the model's dtype or, before that, what an entropy in the loss adds to it."""
    numbers = min(actor.mb_spec.max_tokens_per_mb * shape.vocab, LOGITS_AT_ONCE)
    return numbers * (8 + (4 if actor.entropy_coeff > 0 else BYTES[actor.dtype]))


def _each(parameters: int, size: int, over: int = 1) -> str:
    split = f" over {over} GPUs" if over > 1 else ""
    return f"{parameters / 1e6:,.1f} M × {size} bytes{split}"
