"""The model that learns: gradients of one batch, an optimizer step that is taken or not, weights, checkpoints.

    compute_gradients(groups) ─► UpdateStats ─► the caller's gate ─┬─ commit()   policy_version += 1
                                                                   └─ discard()  not a bit has moved

A plain class without Ray or HTTP, used from one thread. Master weights, gradients and moments are float32;
`actor.dtype=bfloat16` is torch's autocast over them, so small updates are not lost to rounding. Dropout is off.
On a CPU the same inputs give the same bits. It was written for CUDA too but has not been run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from actors import model_folder, training_state
from actors.objective import Batch, Means, Objective
from actors.optimizer import build_optimizer, learning_rate
from actors.update_stats import LogprobDistance, UpdateStats
from launcher.config import ActorConfig, RefConfig
from launcher.errors import CheckpointError, ConfigError, ResourceError, TrainerError
from launcher.rollouts import RolloutGroup
from launcher.state_files import TENSORS_FILE

__all__ = ["PolicyModel", "UpdateStats", "torch_dtype"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a setting such as actor.dtype. Raises ConfigError."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported", f"set actor.dtype to one of {', '.join(DTYPES)}")
    return DTYPES[name]


class PolicyModel:
    """See the module. The constructor raises UsageErrors (model, settings, machine); the methods raise RunErrors."""

    def __init__(
        self,
        actor: ActorConfig,
        ref: RefConfig,
        *,
        temperature: float,
        total_steps: int,
        tokenizer_path: str | None = None,
    ) -> None:
        """`tokenizer_path` None: the tokenizer of actor.path."""
        if not temperature > 0:
            raise ConfigError(
                f"gconfig.temperature is {temperature}: a model can't be trained on greedy samples",
                "set gconfig.temperature to more than 0, such as 1.0",
            )
        self._actor = actor
        self._total_steps = total_steps
        self._device = _device(actor)
        self._dtype = torch_dtype(actor.dtype)
        self.folder = model_folder.local_folder(actor.path, key="actor.path")
        key = "actor.path" if tokenizer_path is None else "tokenizer_path"
        tokenizer_folder = model_folder.local_folder(tokenizer_path or actor.path, key=key)
        self.tokenizer = model_folder.load_tokenizer(tokenizer_folder, key=key)
        self._side_files = model_folder.read_side_files(self.folder, tokenizer_folder)
        self._model = self._load(self.folder, torch.float32, key="actor.path")
        if actor.gradient_checkpointing:
            _checkpoint_layers(self._model)
        self._optimizer = build_optimizer(self._model, actor.optimizer)
        reference = self._load_reference(ref) if actor.kl_ctl > 0 else None
        self._objective = Objective(actor, temperature=temperature, dtype=self._dtype, reference=reference)
        self._stats: UpdateStats | None = None
        self.policy_version = 0

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and completion that the model was made for; None where its config doesn't say."""
        return getattr(self._model.config, "max_position_embeddings", None)

    def compute_gradients(self, groups: Sequence[RolloutGroup]) -> UpdateStats:
        """Forward and backward over the batch, in micro-batches; the gradient is clipped and waits for `commit`.

        A reward of None is not a number, and so makes the batch one that can't be committed; so does having no
        tokens. Raises TrainerError, ConfigError (a sequence longer than a micro-batch), and leaves no gradient then.
        """
        self.discard()
        batch = self._objective.prepare(groups, self._device)
        try:
            sums = [self._objective.run(self._model, part.to(self._device), batch) for part in batch.micro_batches]
            grad_norm = clip_grad_norm_(self._model.parameters(), self._actor.optimizer.gradient_clipping).item()
            distances = self._objective.distances(groups, sums)
            self._stats = self._stats_of(batch, self._objective.means(batch, sums), grad_norm, distances)
        except torch.OutOfMemoryError as error:
            self.discard()
            raise TrainerError(
                f"the GPU ran out of memory while training: {str(error).splitlines()[0]}",
                "set actor.gradient_checkpointing=true, or make actor.mb_spec.max_tokens_per_mb or "
                "sglang.mem_fraction_static smaller",
            ) from error
        except BaseException:
            self.discard()  # half a gradient must never be committed
            raise
        return self._stats

    def commit(self) -> None:
        """Take the optimizer step that `compute_gradients` prepared. Raises TrainerError where there is none.

        Where no sequence had an advantage, there is no gradient and nothing moves: neither momentum nor weight decay
        carries the model away on data that says nothing.
        """
        if self._stats is None:
            raise TrainerError("there are no gradients to commit", "call compute_gradients before each commit")
        if not self._stats.finite:
            raise TrainerError(
                f"these gradients must not be committed: {', '.join(self._stats.problems)}",
                "discard them and drop the batch",
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self._stats.learning_rate
        self._optimizer.step()
        self.policy_version += 1
        self.discard()

    def discard(self) -> None:
        """Forget the gradients. Weights and optimizer stay as they are."""
        self._optimizer.zero_grad(set_to_none=True)
        self._stats = None

    def weights_are_finite(self) -> bool:
        parameters = self._model.parameters()
        return bool(torch.stack([parameter.detach().isfinite().all() for parameter in parameters]).all())

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Weights by Hugging Face name, as servers load them; a tied head is left out, as `save_pretrained` does.

        As float32 they share memory with the model: use or copy them before the next commit.
        """
        for name, weight in model_folder.named_weights(self._model):
            yield name, weight.to(dtype)

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        """Write a whole Hugging Face folder into the existing `folder`, for servers to load. Raises OSError."""
        model_folder.write_model_folder(
            folder, side_files=self._side_files, weights=self.named_weights(dtype), dtype=dtype
        )

    def save(self, folder: Path) -> None:
        """Write a whole Hugging Face folder and the training state into `folder`, which may exist.

        Raises CheckpointError. Not atomic and not synced: that is the checkpoint store's.
        """
        exact = self._dtype == torch.float32
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.export(folder, self._dtype)
            training_state.save_training_state(
                folder,
                policy_version=self.policy_version,
                parameters=dict(self._model.named_parameters()),
                optimizer=self._optimizer,
                master_weights=model_folder.WEIGHTS_FILE if exact else TENSORS_FILE,
            )
        except OSError as error:
            raise CheckpointError(f"{folder} was not written: {error}", "is there room, may we write there?") from error

    def training_state(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """All that `load` needs, as the content of its two files: facts for JSON, and tensors, the weights among them.

        They share memory with the model: write them before the next commit.
        """
        return training_state.collect_training_state(
            policy_version=self.policy_version,
            parameters=dict(self._model.named_parameters()),
            optimizer=self._optimizer,
            master_weights=TENSORS_FILE,
        )

    def load(self, folder: Path) -> None:
        """Go on exactly where `save` was called: weights, moments, counters, random numbers. Drops any gradient.

        The reference stays: it is the model of ref.path, not of a checkpoint.
        Raises CheckpointError naming the file; where something misfits, nothing has been changed.
        """
        facts = training_state.read_facts(folder)
        training_state.load_training_state(
            folder, facts=facts, parameters=dict(self._model.named_parameters()), optimizer=self._optimizer
        )
        self.policy_version = facts.policy_version
        self.discard()

    def begin_anew(self) -> None:
        """Back to the weights of actor.path and an optimizer that has seen nothing. Raises ModelError."""
        if self.policy_version:
            fresh = self._load(self.folder, torch.float32, key="actor.path")
            with torch.no_grad():
                for mine, first in zip(self._model.parameters(), fresh.parameters(), strict=True):
                    mine.copy_(first)
            self._optimizer = build_optimizer(self._model, self._actor.optimizer)
        self.policy_version = 0
        self.discard()

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Log-probs of `completion` after `prompt` at temperature 1, as a greedy server reports them. Any thread's."""
        tokens = torch.tensor([[*prompt, *completion]], device=self._device)
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = self._model(input_ids=tokens, use_cache=False).logits
        predicting = torch.log_softmax(logits[0, len(prompt) - 1 : -1].float(), dim=-1)
        found: list[float] = predicting.gather(-1, tokens[0, len(prompt) :, None])[:, 0].tolist()
        return found

    def _load(self, folder: Path, dtype: torch.dtype, *, key: str) -> PreTrainedModel:
        attention = self._actor.attn_implementation
        model = model_folder.load_model(folder, dtype=dtype, attn_implementation=attention, key=key)
        return model.to(self._device).eval()  # type: ignore[arg-type, no-any-return]  # annotated wrongly upstream

    def _load_reference(self, ref: RefConfig) -> PreTrainedModel:
        folder = model_folder.local_folder(ref.path, key="ref.path")
        return self._load(folder, torch_dtype(ref.dtype), key="ref.path").requires_grad_(False)

    def _stats_of(self, batch: Batch, means: Means, grad_norm: float, distances: Mapping[str, float]) -> UpdateStats:
        figures = {"loss": means.loss, "gradient norm": grad_norm, "distance of log-probs": means.distance}
        optimizer = self._actor.optimizer
        return UpdateStats(
            loss=means.loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate(self.policy_version, total_steps=self._total_steps, config=optimizer),
            clip_fraction_low=means.clipped_low,
            clip_fraction_high=means.clipped_high,
            ratio_mean=means.ratio,
            approx_kl=means.approx_kl,
            kl_ref=means.kl_ref if self._actor.kl_ctl > 0 else None,
            entropy=means.entropy,
            logprob_distance=LogprobDistance(mean=means.distance, max=means.farthest, by_server=distances),
            n_sequences=len(batch.weights),
            n_learning=batch.n_learning,
            n_tokens=batch.n_tokens,
            n_micro_batches=len(batch.micro_batches),
            problems=tuple(f"{name} is {value}" for name, value in figures.items() if not math.isfinite(value)),
        )


def _device(actor: ActorConfig) -> torch.device:
    """Where to train, with torch's threads set for it. Raises ResourceError."""
    if actor.device == "cuda" and not torch.cuda.is_available():
        raise ResourceError("actor.device=cuda, and torch finds no GPU here", "set actor.device=cpu or auto")
    device = torch.device("cuda" if actor.device != "cpu" and torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and actor.threads is not None:
        torch.set_num_threads(actor.threads)
    return device


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only the layers' inputs and compute each layer again in the backward pass.

    Transformers does that only for layers in training mode. Only the layers' own flag is set, not that of what is in
    them, so dropout stays off.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
