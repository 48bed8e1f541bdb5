"""What learns in one process: the complete model, or with several ranks a slice of each weight.

Each public method is an order that all ranks carry out at the same time, each with its own arguments; only rank 0's
answer counts. actors/model/policy_model.py gives the orders, one for the gradients of a batch and one for its commit.
One rank and several do the same, except for the order in which gradients are summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

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
from actors.model.token_logprobs import LogprobModel
from actors.model.torch_settings import checkpoint_layers, own_dtype, torch_dtype
from actors.model.training_state import LearnedState, StateReader
from launcher.checkpoints.manifest import MOMENTS
from launcher.config.optimizer import ADAMW
from launcher.config.recipe import AdvNormConfig
from launcher.config.schema import ActorConfig, RefConfig


class Learner:
    """`passes`: sums and gradient norm of each part of the batch so far; `looked`: the sums of a pass over all of it
    before the first gradient, where there was one."""

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
        reference = None
        if actor.needs_reference:
            source = None if sources is None else sources.reference
            reference = self._hold(source, "ref.path", ref.path, torch_dtype(ref.dtype)).requires_grad_(False)
        self.optimizer = build_optimizer(self.model, actor.optimizer)
        self.objective = Objective(actor, temperature=temperature, dtype=self._dtype, reference=reference)
        self._batches: list[Batch] = []
        self.passes: list[tuple[Sums, float]] = []
        self.looked: Sums | None = None

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What learns: all of the model, or with actor.use_lora its adapters."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

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
        for name, weight in model_folder.named_weights(self.model):
            yield name, self._group.whole(weight.to(dtype))

    @torch.no_grad()
    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        yield from merged_weights(self.model, self._actor, self._group.whole)

    def exported(self, learned: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The same from weights that were collected before; what doesn't learn is the model's own."""
        for name, own in model_folder.named_weights(self.model):
            yield name, learned.get(name, own).to("cpu", dtype)

    def gather_weights(self, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
        """All at once: a generator that stopped half-way would leave the other ranks waiting."""
        return list(self.weights(dtype))

    def learned(self) -> LearnedState:
        states, is_adamw = self.optimizer.state, self._is_adamw
        parts = {name: parts_of(states[tensor]) for name, tensor in self.parameters.items() if tensor in states}
        steps = {name: int(state[STEP].item()) if STEP in state else 0 for name, state in parts.items()}
        moments = {
            name: {part: self._group.whole(value) for part, value in state.items() if part != STEP or not is_adamw}
            for name, state in parts.items()
        }
        weights = {name: self._group.whole(parameter.detach()) for name, parameter in self.parameters.items()}
        return LearnedState(weights=weights, moments=moments, steps=steps, is_adamw=is_adamw)

    # ── going elsewhere ──

    @torch.no_grad()
    def go_back(self, reader: StateReader | None, steps: Mapping[str, int]) -> None:
        """Weights and moments as `reader` has them, which is the first rank's, for the parameters in `steps`."""
        parameters = self.parameters
        if not self._is_adamw:
            assert reader is not None, "there are no other ranks"
            self.optimizer = build_optimizer(self.model, self._actor.optimizer)  # Adagrad makes its state only here
            resume_state(self.optimizer, parameters, reader)
        for name, parameter in parameters.items():
            self._group.put(parameter, None if reader is None else reader.weight(name))
        if self._is_adamw:
            self._put_moments(reader, steps)
        self.discard()

    def _put_moments(self, reader: StateReader | None, steps: Mapping[str, int]) -> None:
        """Each rank's slice."""
        self.optimizer.state.clear()
        for name, step in steps.items():
            parameter = self.parameters[name]
            state = {"step": torch.tensor(float(step), dtype=torch.float32, device=self._device)}
            for moment in MOMENTS:
                state[moment] = torch.empty_like(parameter)
                self._group.put(state[moment], None if reader is None else reader.moment(moment, name))
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
