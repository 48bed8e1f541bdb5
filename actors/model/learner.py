"""What learns in one process: the complete model, or with several ranks a slice of each weight.

Most public methods are orders that all ranks carry out at the same time, each with its own arguments; only rank 0's
answer counts. actors/model/policy_model.py gives the orders, one for the gradients of a batch and one for its commit.
What keeps the state is asked of each rank beside these: it writes its own rows, and waits for no other.
One rank and several do the same, except for the order in which gradients are summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from actors.model import model_folder
from actors.model.advantages import batch_normalised
from actors.model.lora import add_adapters, merged_weights
from actors.model.model_sources import Sources
from actors.model.objective import Batch, Objective, Sums, completion_logprobs
from actors.model.optimizer import STEP, build_optimizer, parts_of, put_parts, resume_state, step_at
from actors.model.rank_collectives import RankGroup
from actors.model.stored_tensors import DoubleBuffer, TensorRows, overwrite_tensors
from actors.model.token_logprobs import LogprobModel
from actors.model.torch_settings import checkpoint_layers, own_dtype, stream_of_its_own, torch_dtype
from actors.model.training_state import SavedState, TrainingFacts, open_state
from launcher.checkpoints.manifest import ADAPTER_FILE, MASTER, TENSORS_FILE, WEIGHTS_FILE, WrittenPart, stored_name
from launcher.config.optimizer import ADAMW
from launcher.config.recipe import AdvNormConfig
from launcher.config.schema import ActorConfig, RefConfig
from launcher.resources.hardware import find_hardware


class Learner:
    """`parameters`: what learns, all of the model, or with actor.use_lora its adapters. `passes`: sums and gradient
    norm of each part of the batch so far; `looked`: the sums of a pass over all of it before the first gradient, where
    there was one."""

    def __init__(
        self,
        actor: ActorConfig,
        ref: RefConfig,
        *,
        temperature: float,
        device: torch.device,
        sources: Sources | None,
        group: RankGroup,
    ) -> None:
        """`sources`: the first rank's; the others get their slices from it."""
        self._actor = actor
        self._device = device
        self._dtype = torch_dtype(actor.dtype)
        self._group = group
        self.policy = self._hold(
            None if sources is None else sources.policy, "actor.path", actor.path, own_dtype(actor)
        )
        if actor.gradient_checkpointing:
            checkpoint_layers(self.model)
        # FSDP puts others in their places while a layer computes, and the state is read beside that
        self._weights = dict(model_folder.named_weights(self.model))
        self.parameters = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        reference = None
        if actor.needs_reference:
            source = None if sources is None else sources.reference
            reference = self._hold(source, "ref.path", ref.path, torch_dtype(ref.dtype)).requires_grad_(False)
        self.optimizer = build_optimizer(self.model, actor.optimizer)
        self.objective = Objective(actor, temperature=temperature, dtype=self._dtype, reference=reference)
        self._batches: list[Batch] = []
        self.passes: list[tuple[Sums, float]] = []
        self.looked: Sums | None = None
        self._copy: Mapping[str, TensorRows] | None = None
        self._buffer: DoubleBuffer | None = None  # pinned memory is made when the first state is written

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model

    @property
    def _is_adamw(self) -> bool:
        return self._actor.optimizer.type == ADAMW

    # ── a step ──

    def compute_gradients(self, batches: Sequence[Batch]) -> None:
        """Forward and backward over the first of `batches`, which are the parts of one batch, an optimizer step each.
        Before it, where the objective asks for that or there are several, a forward pass over all."""
        self.discard()
        self._batches = [batch.to(self._device) for batch in batches]
        if len(batches) > 1 or self.objective.looks_ahead:
            self._look_ahead()
        self.passes.append(self._pass(self._batches[0]))

    def step_ahead(self, learning_rate: float) -> None:
        """All optimizer steps of the batch but the last, whose gradient waits for `commit`.

        Where one is not finite, or fails, weights and moments are put back. All ranks see the same totals, so they
        stop at the same step.
        """
        kept = self._copies()
        try:
            for batch in self._batches[1:]:
                self._step(learning_rate)
                totals, norm = self._pass(batch)
                self.passes.append((totals, norm))
                is_finite = bool(totals.totals[0].isfinite()) and bool(batch.advantages.isfinite().all())
                if not (is_finite and math.isfinite(norm)):
                    self._put_back(kept)
                    break
        except BaseException:
            self._put_back(kept)
            raise

    def commit(self, learning_rate: float) -> None:
        """Take the optimizer step whose gradient waits."""
        self._step(learning_rate)
        self.discard()

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._batches = []
        self.passes = []
        self.looked = None

    def _look_ahead(self) -> None:
        """A pass without a gradient over all, before any step; advantages are normalised after it."""
        parts: list[Sums] = []
        for batch in self._batches:
            found: list[Sums] = []
            for index, micro_batch in enumerate(batch.micro_batches):
                batch.micro_batches[index], sums = self.objective.look_ahead(
                    self.policy, micro_batch.to(self._device), batch, before_steps=len(self._batches) > 1
                )
                found += [] if sums is None else [sums]
            parts += [self._total(found)] if found else []
        norm = self._actor.adv_norm
        if norm.mean_level is not None or norm.std_level is not None:
            self._normalise(norm)
        self.looked = self.objective.join(parts) if parts else None

    def _normalise(self, norm: AdvNormConfig) -> None:
        places = [(batch, index) for batch in self._batches for index in range(len(batch.micro_batches))]
        looked = [batch.micro_batches[index] for batch, index in places]
        normalised = batch_normalised(
            [one.advantages for one in looked if one.advantages is not None],
            [(batch.weights[one.sequences] > 0).double() for (batch, _), one in zip(places, looked, strict=True)],
            norm,
            total=self._group.total,
        )
        for (batch, index), one, advantages in zip(places, looked, normalised, strict=True):
            batch.micro_batches[index] = replace(one, advantages=advantages)

    def _pass(self, batch: Batch) -> tuple[Sums, float]:
        """Forward and backward: the sums over all ranks, and the norm of the gradient, which is clipped."""
        sums = [self.objective.run(self.policy, one.to(self._device), batch) for one in batch.micro_batches]
        norm = clip_grad_norm_(self.model.parameters(), self._actor.optimizer.gradient_clipping)
        total = self._total(sums)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return total, norm.item()

    def _total(self, of_micro_batches: Sequence[Sums]) -> Sums:
        sums = self.objective.add_up(of_micro_batches)
        return Sums(
            totals=self._group.total(sums.totals),
            farthest=self._group.largest(sums.farthest),
            distances=self._group.total(sums.distances),
        )

    def _step(self, learning_rate: float) -> None:
        step_at(self.optimizer, learning_rate)
        self.optimizer.zero_grad(set_to_none=True)

    def _copies(self) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """What this process has of weights and moments, copied into the host's memory, for `_put_back`."""
        states = self.optimizer.state
        return [
            (one, _copied(one), {name: _copied(part) for name, part in parts_of(states.get(one, {})).items()})
            for one in self.parameters.values()
        ]

    @torch.no_grad()
    def _put_back(self, kept: Sequence[tuple[Tensor, Tensor, dict[str, Tensor]]]) -> None:
        """Bit for bit what it was at `_copies`."""
        for parameter, weights, moments in kept:
            _local(parameter).copy_(weights)
            if moments:
                put_parts(self.optimizer.state[parameter], moments)
            else:  # nor were there any then
                self.optimizer.state.pop(parameter, None)
        self.optimizer.zero_grad(set_to_none=True)

    # ── what it holds ──

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Sums show what is not finite in a sixth of the time; where one is not, each weight is looked at."""
        parts = [_local(part) for part in self.model.parameters()]
        damaged = ~torch.stack([part.sum().float() for part in parts]).isfinite().all()
        if damaged:
            damaged = ~torch.stack([part.isfinite().all() for part in parts]).all()
        return not self._group.largest(damaged.float()).item()

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Of `completion` after `prompt`, at temperature 1."""
        return completion_logprobs(self.policy, [(prompt, completion)], device=self._device, dtype=self._dtype)[0]

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """By Hugging Face name; in one process they share memory with the model, of several ranks they are copies."""
        if self._actor.use_lora:
            yield from ((name, weight.to(dtype)) for name, weight in self._merged())
            return
        for name, weight in self._weights.items():
            yield name, self._group.whole(weight.detach().to(dtype))

    @torch.no_grad()
    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        yield from merged_weights(self.model, self._actor, self._group.whole)

    def gather_weights(self, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
        """All at once: a generator that stopped half-way would leave the other ranks waiting."""
        return list(self.weights(dtype))

    # ── keeping it, in any thread: nothing here waits for another rank ──

    def state_facts(self) -> tuple[dict[str, int], dict[str, list[str]] | None]:
        """Of each parameter how often it was stepped, and what another optimizer than AdamW keeps of it."""
        kept = self._kept()
        steps = {name: int(parts[STEP].item()) if STEP in parts else 0 for name, parts in kept.items()}
        return steps, None if self._is_adamw else {name: [*parts] for name, parts in kept.items()}

    def state_bytes(self) -> tuple[int, int]:
        """Of all ranks together: weights; and those with what the optimizer keeps by now."""
        pieces = self._state_pieces()
        weights = sum(piece.whole_bytes for name, piece in pieces.items() if name.startswith(MASTER))
        return weights, sum(piece.whole_bytes for piece in pieces.values())

    def copy_state(self, share: float) -> bool:
        """Copy this rank's part of weights and optimizer into the host's memory, where that takes at most `share` of
        what is free there, of which each rank may have as much as if all were on this host.

        In place of the copy before."""
        self._copy = None
        room = share * find_hardware().memory_free / self._group.size
        with stream_of_its_own(self._device):
            pieces = self._state_pieces()
            if sum(piece.tensor.nbytes for piece in pieces.values()) > room:
                return False
            self._copy = {name: piece.copied() for name, piece in pieces.items()}
        return True

    def drop_copy(self) -> None:
        self._copy = None

    def write_state(
        self, folder: Path, random: Mapping[str, Tensor], *, has_masters: bool, is_copy: bool, is_durable: bool
    ) -> WrittenPart:
        """This rank's part of TENSORS_FILE. `has_masters`: without the float32 weights. `is_durable`: as of
        `overwrite_tensors`. Raises OSError."""
        with stream_of_its_own(self._device):
            pieces = self._copied() if is_copy else self._state_pieces()
            if has_masters:
                pieces = {name: piece for name, piece in pieces.items() if not name.startswith(MASTER)}
            pieces = {**pieces, **{name: TensorRows.of(state) for name, state in random.items()}}
            if self._device.type == "cuda" and self._buffer is None:
                self._buffer = DoubleBuffer()
            buffer = None if is_copy else self._buffer
            return overwrite_tensors(
                folder / TENSORS_FILE, pieces, rank=self._group.rank, buffer=buffer, is_durable=is_durable
            )

    def write_weights(self, folder: Path, dtype: torch.dtype, *, is_copy: bool, is_durable: bool) -> WrittenPart:
        """This rank's part of WEIGHTS_FILE. Raises OSError."""
        with stream_of_its_own(self._device):
            copied = self._copied() if is_copy else {}
            pieces = {
                name: copied.get(f"{MASTER}{name}", TensorRows.of(own)).cast(dtype)
                for name, own in self._weights.items()
            }
            return model_folder.write_weights(
                folder / WEIGHTS_FILE, pieces, rank=self._group.rank, is_durable=is_durable
            )

    def write_adapter(self, folder: Path) -> WrittenPart:
        """This rank's part of ADAPTER_FILE, which is always a checkpoint's. Raises OSError."""
        pieces = {stored_name(name): TensorRows.of(factor) for name, factor in self.parameters.items()}
        return model_folder.write_weights(folder / ADAPTER_FILE, pieces, rank=self._group.rank, is_durable=True)

    def _state_pieces(self) -> dict[str, TensorRows]:
        """What learns and what the optimizer keeps; they share memory with both."""
        pieces = {
            f"{part}.{name}": TensorRows.of(value)
            for name, parts in self._kept().items()
            for part, value in parts.items()
            if part != STEP or not self._is_adamw  # AdamW's is among the facts
        }
        return pieces | {f"{MASTER}{name}": TensorRows.of(parameter) for name, parameter in self.parameters.items()}

    def _kept(self) -> dict[str, dict[str, Tensor]]:
        states = self.optimizer.state
        return {name: parts_of(states[tensor]) for name, tensor in self.parameters.items() if tensor in states}

    def _copied(self) -> Mapping[str, TensorRows]:
        assert self._copy is not None, "the copy was made before it is written"
        return self._copy

    # ── going elsewhere ──

    def go_back(self, folder: Path, facts: TrainingFacts) -> None:
        """Weights and optimizer as `folder` has them: each rank reads its part. Raises CheckpointError."""
        with open_state(folder, facts) as saved:
            if self._is_adamw:
                self._put_moments(saved)
            else:
                self.optimizer = build_optimizer(self.model, self._actor.optimizer)  # Adagrad makes its state only here
                resume_state(self.optimizer, self.parameters, saved)
            for name, parameter in self.parameters.items():
                saved.put_weight(parameter, name)
        self.discard()

    def _put_moments(self, saved: SavedState) -> None:
        self.optimizer.state.clear()
        for name, step in saved.facts.optimizer_steps.items():
            parameter = self.parameters[name]
            state = {STEP: torch.tensor(float(step), dtype=torch.float32, device=self._device)}
            for moment in saved.facts.parts[name]:
                state[moment] = torch.empty_like(parameter, requires_grad=False)
                saved.put_part(state[moment], moment, name)
            self.optimizer.state[parameter] = state

    def begin_anew(self, first: PreTrainedModel | None) -> None:
        """The weights of `first`, which is the first rank's, and an optimizer that has seen nothing."""
        self._fill(self.model, first)
        self.optimizer = build_optimizer(self.model, self._actor.optimizer)
        self.discard()

    # ── slices ──

    def _hold(self, source: PreTrainedModel | None, key: str, path: str, dtype: torch.dtype) -> LogprobModel:
        """`source`, which a rank alone takes as it is; of several each has an empty model of `path` filled from it."""
        if self._group.size == 1:
            assert source is not None
            return LogprobModel(model_folder.moved(source, self._device).eval())  # type: ignore[no-untyped-call]
        folder = model_folder.local_folder(path, key=key)
        attention = self._actor.attn_implementation
        model = model_folder.empty_model(folder, dtype=dtype, attn_implementation=attention)
        is_policy = key == "actor.path"
        if is_policy and self._actor.use_lora:
            add_adapters(model, self._actor)
        held = LogprobModel(model.eval())  # type: ignore[no-untyped-call]
        self._group.shard(held, in_bfloat16=is_policy and self._actor.gather_dtype == "bfloat16")
        self._fill(model, source)
        return held

    @torch.no_grad()
    def _fill(self, model: PreTrainedModel, source: PreTrainedModel | None) -> None:
        theirs: dict[str, Tensor] = {}
        if source is not None:
            theirs = dict(source.named_parameters()) | dict(source.named_buffers())
        for name, mine in [*model.named_parameters(), *model.named_buffers()]:
            self._group.put(mine, theirs.get(name))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copied(tensor: Tensor) -> Tensor:
    return _local(tensor.detach()).to("cpu", copy=True)
