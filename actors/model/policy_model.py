"""The model that learns: gradients of one batch, an optimizer step, committed or discarded, weights, checkpoints.

    compute_gradients(groups) ─► UpdateStats ─► the caller's gate ─┬─ step_ahead() ─► commit()   policy_version += 1
                                                                   └─ discard()  not a bit has moved

A batch is one optimizer step, or actor.ppo_n_minibatches of them: `step_ahead` takes all but the last. What it finds
not finite on the way undoes them all, so a batch is committed whole or not at all.

A plain class without Ray or HTTP, used from one thread. Master weights, gradients and moments are float32;
`actor.dtype=bfloat16` is torch's autocast over them, so small updates are not lost to rounding. Dropout is off.
On a CPU the same inputs give the same bits. It was written for CUDA too but has not been run on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from actors.model import lora, model_folder, training_state
from actors.model.batch_figures import stats_of
from actors.model.learner import Learner
from actors.model.model_sources import Sources
from actors.model.objective import Batch
from actors.model.optimizer import learning_rate
from actors.model.rank_collectives import RankGroup
from actors.model.stored_tensors import TensorRows
from actors.model.torch_settings import torch_dtype, training_device
from actors.model.training_state import TrainingState
from actors.model.update_stats import UpdateStats
from launcher.base.errors import CheckpointError, ConfigError, TrainerError
from launcher.base.rollouts import RolloutGroup
from launcher.checkpoints.in_memory_checkpoints import write_small
from launcher.checkpoints.manifest import (
    ADAPTER_FILE,
    FACTS_FILE,
    MOMENTS,
    TENSORS_FILE,
    WEIGHTS_FILE,
    FileRecord,
    WrittenPart,
    record_of,
)
from launcher.checkpoints.model_shape import trained_positions
from launcher.config.optimizer import ADAMW
from launcher.config.schema import ActorConfig, RefConfig

__all__ = ["PolicyModel", "UpdateStats", "torch_dtype"]


class Ranks(Protocol):
    """All ranks, of which this one is the first. `lost`: why they can't work together any more, or ""."""

    size: int
    lost: str

    def meet(self, device: torch.device) -> RankGroup: ...

    def call(self, learner: Learner, order: str, arguments: Sequence[Sequence[Any]]) -> Any:
        """Have each rank's learner carry out `order` with its arguments; returns this rank's answer. One at a time."""

    def ask_each(self, learner: Learner, order: str, *arguments: Any, **named: Any) -> list[Any]:
        """What each rank's learner answers, rank 0's first. Beside `call`, from any thread: these orders wait for no
        other rank, and one that fails leaves the ranks as they are. Raises what a learner raised."""

    def close(self) -> None:
        """End the others."""


class OneRank:
    """This process alone."""

    size = 1
    lost = ""

    def meet(self, device: torch.device) -> RankGroup:
        return RankGroup(device)

    def call(self, learner: Learner, order: str, arguments: Sequence[Sequence[Any]]) -> Any:
        return getattr(learner, order)(*arguments[0])

    def ask_each(self, learner: Learner, order: str, *arguments: Any, **named: Any) -> list[Any]:
        return [getattr(learner, order)(*arguments, **named)]

    def close(self) -> None:
        """There are no others."""


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
        ranks: Ranks | None = None,
    ) -> None:
        """`tokenizer_path` None: the tokenizer of actor.path. `ranks`: None where this process is alone."""
        if not temperature > 0:
            raise ConfigError(
                f"gconfig.temperature is {temperature}: a model can't be trained on greedy samples",
                "set gconfig.temperature to more than 0, such as 1.0",
            )
        self._actor = actor
        self._total_steps = total_steps
        self._ranks = ranks or OneRank()
        # A server's admission asks for log-probs on another thread: a forward pass beside a backward pass would share
        # the model's buffers. `weights_lock` of the step loop, where it is held too, is taken before.
        self._turn = threading.Lock()
        self._device = training_device(actor)
        self._dtype = torch_dtype(actor.dtype)
        try:
            sources = Sources(actor, ref)
            self.folder = sources.folder
            key = "actor.path" if tokenizer_path is None else "tokenizer_path"
            tokenizer_folder = model_folder.local_folder(tokenizer_path or actor.path, key=key)
            self.tokenizer = model_folder.load_tokenizer(tokenizer_folder, key=key)
            self._side_files = model_folder.read_side_files(self.folder, tokenizer_folder)
            self._learner = Learner(
                actor,
                ref,
                temperature=temperature,
                device=self._device,
                sources=sources,
                group=self._ranks.meet(self._device),
            )
        except BaseException:
            self.close()  # a trainer that is ordered to start again starts other ranks
            raise
        self._objective = self._learner.objective
        self._stats: UpdateStats | None = None
        self._minibatches: list[Batch] = []
        self._groups: Sequence[RolloutGroup] = ()
        self._share_folders = False  # whether the ranks were seen to write into the same one
        self.policy_version = 0
        self.largest_micro_batch = 0  # of all so far, tokens, padding included

    @property
    def lost(self) -> str:
        """Why the ranks can't continue; "" where they can."""
        return self._ranks.lost

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and completion that the model was made for; None where its config doesn't contain it."""
        return trained_positions(self._learner.model.config.to_dict())

    def compute_gradients(self, groups: Sequence[RolloutGroup]) -> UpdateStats:
        """Forward and backward over the batch, in micro-batches; the gradient is clipped and waits for `commit`.

        Of a batch with several optimizer steps: over the part of the first one, after a forward pass over all. A reward
        of None is not a number, and so makes the batch one that can't be committed; so does having no tokens. Raises
        TrainerError, ConfigError (a sequence longer than a micro-batch), and leaves no gradient then.
        """
        self._forget()
        with self._nothing_left_of_failures():
            minibatches = self._objective.prepare(groups, ranks=self._ranks.size, policy_version=self.policy_version)
            made = (one.input_ids.numel() for of_ranks in minibatches for of in of_ranks for one in of.micro_batches)
            self.largest_micro_batch = max(self.largest_micro_batch, *made)
            self._order_each("compute_gradients", [(list(of_rank),) for of_rank in zip(*minibatches, strict=True)])
            self._minibatches = [of_ranks[0] for of_ranks in minibatches]
            self._groups = groups
            self._stats = self._stats_of_passes()
        return self._stats

    def step_ahead(self) -> UpdateStats:
        """All optimizer steps of the batch but the last, whose gradient waits for `commit`; figures of all of them.

        Where one is not finite the weights are put back, and so where anything fails. Raises as `compute_gradients`.
        """
        stats = self._committable()
        if len(self._minibatches) == 1:
            return stats
        with self._nothing_left_of_failures():
            self._order("step_ahead", stats.learning_rate)
            self._stats = self._stats_of_passes()
        return self._stats

    def commit(self) -> None:
        """Take the optimizer step whose gradient waits. Raises TrainerError where there is none, or others come first.

        Where no sequence had an advantage, there is no gradient and nothing moves: neither momentum nor weight decay
        carries the model away on data that says nothing.
        """
        stats = self._committable()
        if len(self._learner.passes) < len(self._minibatches):
            raise TrainerError("this batch has several optimizer steps", "call step_ahead before commit")
        self._order("commit", stats.learning_rate)
        self.policy_version += 1
        self._forget()

    def _committable(self) -> UpdateStats:
        if self._stats is None:
            raise TrainerError("there are no gradients to commit", "call compute_gradients before each commit")
        if not self._stats.finite:
            raise TrainerError(
                f"these gradients must not be committed: {', '.join(self._stats.problems)}",
                "discard them and drop the batch",
            )
        return self._stats

    def _stats_of_passes(self) -> UpdateStats:
        """Of all parts of the batch so far."""
        return stats_of(
            self._objective,
            self._minibatches,
            self._groups,
            self._learner.passes,
            looked=self._learner.looked,
            actor=self._actor,
            policy_version=self.policy_version,
            rate=learning_rate(self.policy_version, total_steps=self._total_steps, config=self._actor.optimizer),
        )

    @contextmanager
    def _nothing_left_of_failures(self) -> Iterator[None]:
        try:
            yield
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

    def discard(self) -> None:
        """Forget the gradients. Weights and optimizer stay as they are."""
        self._forget()
        if not self.lost:  # ranks that can't work together hold nothing that could be committed
            self._order("discard")

    def _forget(self) -> None:
        """What belongs to the gradients here. Each order that begins or ends a batch drops the gradients themselves."""
        self._stats = None
        self._minibatches = []
        self._groups = ()

    def weights_are_finite(self) -> bool:
        is_finite: bool = self._order("is_finite")
        return is_finite

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self._device.type

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Weights by Hugging Face name, as servers load them; a tied head is left out, as `save_pretrained` does.

        As float32 they share memory with the model: use or copy them before the next commit. Of several ranks they
        are complete copies in the host's memory, gathered one after another.
        """
        yield from self._learner.weights(dtype) if self._ranks.size == 1 else self._order("gather_weights", dtype)

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        """Write a complete Hugging Face folder into the existing `folder`, for servers to load.

        Raises OSError; TrainerError where the ranks are seen to write into different folders.
        """
        parts = self._write_model(folder, dtype, is_copy=False, is_durable=False)
        if len(parts) > 1 and not self._share_folders:
            # Once: what each has written is read again, which takes as long as the file system needs for it (not
            # measured); what servers answer is compared with the ranks' own log-probs at each step.
            try:
                record_of(folder / WEIGHTS_FILE, parts)
            except OSError as error:  # it would pass for a full disk, and sound servers would be restarted for it
                raise TrainerError(str(error), "each trainer rank's node must see the same cluster.fileroot") from error
            self._share_folders = True

    def save(self, folder: Path, state: TrainingState | None = None) -> dict[str, Sequence[WrittenPart]]:
        """Write a complete Hugging Face folder and `state` into `folder`, which may exist. None: the present state.

        Returns what each rank wrote of each file that they share, for the checkpoint store to compare. With a state,
        any thread's. Raises CheckpointError. Not atomic and not synced, but for what ranks of other nodes wrote: that
        is the checkpoint store's.
        """
        state = state or self.training_state()
        exact = self._dtype == torch.float32 and not self._actor.use_lora
        try:
            folder.mkdir(parents=True, exist_ok=True)
            weights = self._write_model(folder, self._dtype, is_copy=state.is_copy, is_durable=True)
            written = {WEIGHTS_FILE: weights}
            if self._actor.use_lora:
                lora.write_adapter_config(folder, self._actor)
                written[ADAPTER_FILE] = self._ask_each("write_adapter", folder)
            self._write_facts(folder, state, has_masters=exact)
            written[TENSORS_FILE] = self._ask_each(
                "write_state", folder, state.random, has_masters=exact, is_copy=state.is_copy, is_durable=True
            )
        except OSError as error:
            raise CheckpointError(f"{folder} was not written: {error}", "is there room, may we write there?") from error
        return written

    def _write_model(
        self, folder: Path, dtype: torch.dtype, *, is_copy: bool, is_durable: bool
    ) -> Sequence[WrittenPart]:
        model_folder.write_side_files(folder, self._side_files, dtype=dtype)
        if self._actor.use_lora:  # the sum of model and adapters is made of whole tensors
            pieces = {name: TensorRows.of(weight) for name, weight in self.named_weights(dtype)}
            return [model_folder.write_weights(folder / WEIGHTS_FILE, pieces)]
        return self._ask_each("write_weights", folder, dtype, is_copy=is_copy, is_durable=is_durable)

    def write_state(self, folder: Path, state: TrainingState) -> dict[str, FileRecord]:
        """Write the two files of `state` over what `folder` has of them. Any thread's, until the next `step_ahead` or
        `commit`. Raises OSError."""
        facts = self._write_facts(folder, state, has_masters=False)
        parts = self._ask_each(
            "write_state", folder, state.random, has_masters=False, is_copy=state.is_copy, is_durable=False
        )
        # of several ranks none has seen all of the file: it is read again
        tensors = record_of(folder / TENSORS_FILE, parts) if len(parts) > 1 else parts[0].as_file
        return {FACTS_FILE: facts, TENSORS_FILE: tensors}

    @staticmethod
    def _write_facts(folder: Path, state: TrainingState, *, has_masters: bool) -> FileRecord:
        weights = WEIGHTS_FILE if has_masters else TENSORS_FILE
        return write_small(folder / FACTS_FILE, {**state.facts, "master_weights": weights})

    def training_state(self) -> TrainingState:
        """What `save` and `write_state` need beside the ranks' own tensors. These stay as they are until the next
        `step_ahead` or `commit`."""
        steps, parts = self._learner.state_facts()
        return training_state.collect_training_state(policy_version=self.policy_version, steps=steps, parts=parts)

    def state_bytes(self) -> int:
        """Of a complete state in memory, all ranks together: each weight that the optimizer has not stepped yet will
        add as much per moment."""
        weights, by_now = self._learner.state_bytes()
        return max((1 + len(MOMENTS)) * weights, by_now)

    def copy_to_host(self, state: TrainingState, *, share: float) -> TrainingState | None:
        """`state` with a copy of the tensors in the host's memory, each rank its part, which `save` can be given at any
        time until `drop_copy`. Any thread's.

        None where that takes more than `share` of the free memory of a rank's host, and with actor.use_lora, whose
        export is read from the model.
        """
        if self._actor.use_lora:
            return None
        try:
            are_copied = self._ask_each("copy_state", share)
        except BaseException:
            self.drop_copy()
            raise
        if not all(are_copied):
            self.drop_copy()
            return None
        return replace(state, is_copy=True)

    def drop_copy(self) -> None:
        """Give up what `copy_to_host` took of each rank's host. Any thread's."""
        if not self.lost:
            self._ask_each("drop_copy")

    @property
    def saves_alone(self) -> bool:
        """Whether `save` needs the other ranks, which then can't compute: LoRA's export is gathered from them."""
        return self._ranks.size > 1 and self._actor.use_lora

    def load(self, folder: Path) -> None:
        """Restore exactly what `save` wrote: weights, moments, counters, random numbers. Drops any gradient.

        The reference stays: it is the model of ref.path. Raises CheckpointError naming the file, changing nothing.
        """
        facts = training_state.read_facts(folder)
        shapes = {name: parameter.shape for name, parameter in self._learner.parameters.items()}
        with training_state.open_state(folder, facts) as saved:
            saved.check(folder, shapes, is_adamw=self._actor.optimizer.type == ADAMW)
            self._order("go_back", folder, facts)
            saved.set_random()
        self.policy_version = facts.policy_version
        self._stats = None

    def begin_anew(self) -> None:
        """Back to the weights of actor.path and an optimizer that has seen nothing. Raises ModelError."""
        if self.policy_version:
            fresh = Sources.read_policy(self._actor)
            self._order_each("begin_anew", self._first((fresh,), (None,)))
        self.policy_version = 0
        self.discard()

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Log-probs of `completion` after `prompt` at temperature 1, as a greedy server reports them. Any thread's."""
        found: list[float] = self._order("logprobs", tuple(prompt), tuple(completion))
        return found

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()

    # ── on every rank at once ──

    def _order(self, order: str, *arguments: Any) -> Any:
        return self._order_each(order, [arguments] * self._ranks.size)

    def _order_each(self, order: str, arguments: Sequence[Sequence[Any]]) -> Any:
        """`arguments`: each rank's. Raises TrainerError where a rank is lost, and whatever the own learner raises."""
        with self._turn:
            return self._ranks.call(self._learner, order, arguments)

    def _ask_each(self, order: str, *arguments: Any, **named: Any) -> list[Any]:
        """On every rank too, and beside the steps."""
        return self._ranks.ask_each(self._learner, order, *arguments, **named)

    def _first(self, own: Sequence[Any], others: Sequence[Any]) -> list[Sequence[Any]]:
        return [own, *[others] * (self._ranks.size - 1)]
