"""The part of the learning model in one process: all of it, or, with several ranks, a slice of each weight.

Each public method is an operation that all ranks run at the same time, each with its own arguments; only rank 0's
answer counts. actors/model/policy_model.py calls them. The arithmetic is the same for one rank and for several, except
for the order in which gradients are summed.
"""

from __future__ import annotations

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
from actors.model.model_sources import Empty, Sources
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


class ModelPart:
    """`group` None: one process, which holds everything."""

    def __init__(
        self,
        actor: ActorConfig,
        ref: RefConfig,
        *,
        temperature: float,
        device: torch.device,
        sources: Sources | None,
        group: RankGroup | None = None,
    ) -> None:
        """`sources`: the first rank's; the others get their slices from it."""
        self._actor = actor
        self._device = device
        self._dtype = torch_dtype(actor.dtype)
        self._group = group
        self.policy = self._hold(
            None if sources is None else sources.policy,
            Empty(path=actor.path, key="actor.path", dtype=own_dtype(actor), has_adapters=actor.use_lora),
            checkpoints=actor.gradient_checkpointing,
        )
        reference = None
        if actor.needs_reference:
            reference = self._hold(
                None if sources is None else sources.reference,
                Empty(path=ref.path, key="ref.path", dtype=torch_dtype(ref.dtype)),
            ).requires_grad_(False)
        self.optimizer = build_optimizer(self.model, actor.optimizer)
        self.objective = Objective(actor, temperature=temperature, dtype=self._dtype, reference=reference)
        self._batches: list[Batch] = []
        self._sums: list[Sums] = []
        self._kept: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []

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

    def begin(self, batches: Sequence[Batch]) -> None:
        """`batches`: for each optimizer step its part of the batch."""
        self.discard()
        self._batches = [batch.to(self._device) for batch in batches]

    def look_ahead(self, which: int, index: int) -> None:
        """A pass without a gradient over one micro-batch, before any step."""
        batch = self._batches[which]
        micro_batch = batch.micro_batches[index].to(self._device)
        looked, sums = self.objective.look_ahead(self.policy, micro_batch, batch, before_steps=len(self._batches) > 1)
        batch.micro_batches[index] = looked
        self._sums += [] if sums is None else [sums]

    def finish_look_ahead(self) -> list[Sums]:
        """The distances of each part of the batch, where they were asked for; and advantages are normalised."""
        norm = self._actor.adv_norm
        if norm.mean_level is not None or norm.std_level is not None:
            self._normalise(norm)
        count = [len(batch.micro_batches) for batch in self._batches] if self._sums else []
        return [self._total([self._sums.pop(0) for _ in range(n)]) for n in count]

    def _normalise(self, norm: AdvNormConfig) -> None:
        places = [(batch, index) for batch in self._batches for index in range(len(batch.micro_batches))]
        looked = [batch.micro_batches[index] for batch, index in places]
        normalised = batch_normalised(
            [one.advantages for one in looked if one.advantages is not None],
            [(batch.weights[one.sequences] > 0).double() for (batch, _), one in zip(places, looked, strict=True)],
            norm,
            total=lambda sum_here: sum_here if self._group is None else self._group.total(sum_here),
        )
        for (batch, index), one, advantages in zip(places, looked, normalised, strict=True):
            batch.micro_batches[index] = replace(one, advantages=advantages)

    def run(self, which: int, index: int) -> None:
        """Forward and backward over one micro-batch."""
        batch = self._batches[which]
        self._sums.append(self.objective.run(self.policy, batch.micro_batches[index].to(self._device), batch))

    def finish(self) -> tuple[Sums, float]:
        """The sums over this part of the batch, and the norm of its gradient, which is clipped."""
        norm = clip_grad_norm_(self.model.parameters(), self._actor.optimizer.gradient_clipping)
        sums, self._sums = self._total(self._sums), []
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return sums, norm.item()

    def _total(self, of_micro_batches: Sequence[Sums]) -> Sums:
        sums = self.objective.add_up(of_micro_batches)
        if self._group is None:
            return sums
        return Sums(
            totals=self._group.total(sums.totals),
            farthest=self._group.largest(sums.farthest),
            distances=self._group.total(sums.distances),
        )

    def keep(self) -> None:
        """What this process has of weights and moments, copied into the host's memory, for `put_back`."""
        states = self.optimizer.state
        self._kept = [
            (one, _copied(one), {name: _copied(part) for name, part in parts_of(states.get(one, {})).items()})
            for one in self.parameters.values()
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Bit for bit what it was at `keep`."""
        for parameter, weights, moments in self._kept:
            _local(parameter).copy_(weights)
            if moments:
                put_parts(self.optimizer.state[parameter], moments)
            else:  # nor were there any then
                self.optimizer.state.pop(parameter, None)
        self.discard()

    def step(self, learning_rate: float) -> None:
        step_at(self.optimizer, learning_rate)
        self.optimizer.zero_grad(set_to_none=True)

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._batches, self._sums, self._kept = [], [], []

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Sums show what is not finite in a sixth of the time; where one is not, each weight is looked at."""
        parts = [_local(part) for part in self.model.parameters()]
        damaged = ~torch.stack([part.sum().float() for part in parts]).isfinite().all()
        if damaged:
            damaged = ~torch.stack([part.isfinite().all() for part in parts]).all()
        if self._group is not None:
            damaged = self._group.largest(damaged.float())
        return not damaged.item()

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Of `completion` after `prompt`, at temperature 1."""
        return completion_logprobs(self.policy, [(prompt, completion)], device=self._device, dtype=self._dtype)[0]

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """By Hugging Face name; in one process they share memory with the model, of several ranks they are copies."""
        if self._actor.use_lora:
            yield from ((name, weight.to(dtype)) for name, weight in self._merged())
            return
        for name, weight in model_folder.named_weights(self.model):
            yield name, self._whole(weight.to(dtype))

    @torch.no_grad()
    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        yield from merged_weights(self.model, self._actor, self._whole)

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
            name: {part: self._whole(value) for part, value in state.items() if part != STEP or not is_adamw}
            for name, state in parts.items()
        }
        weights = {name: self._whole(parameter.detach()) for name, parameter in self.parameters.items()}
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
            self._put(parameter, None if reader is None else reader.weight(name))
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
                self._put(state[moment], None if reader is None else reader.moment(moment, name))
            self.optimizer.state[parameter] = state

    def begin_anew(self, first: PreTrainedModel | None) -> None:
        """The weights of `first`, which is the first rank's, and an optimizer that has seen nothing."""
        self._fill(self.model, first)
        self.optimizer = build_optimizer(self.model, self._actor.optimizer)
        self.discard()

    # ── slices ──

    def _hold(self, source: PreTrainedModel | None, empty: Empty, *, checkpoints: bool = False) -> LogprobModel:
        if self._group is None:
            assert source is not None
            model = model_folder.moved(source, self._device)
        else:
            folder = model_folder.local_folder(empty.path, key=empty.key)
            attention = self._actor.attn_implementation
            model = model_folder.empty_model(folder, dtype=empty.dtype, attn_implementation=attention)
            if empty.has_adapters:
                add_adapters(model, self._actor)
        model = model.eval()  # type: ignore[no-untyped-call]
        if checkpoints:
            checkpoint_layers(model)
        held = LogprobModel(model)
        if self._group is not None:
            self._group.shard(held, in_bfloat16=empty.key == "actor.path" and self._actor.gather_dtype == "bfloat16")
            self._fill(model, source)
        return held

    @torch.no_grad()
    def _fill(self, model: PreTrainedModel, source: PreTrainedModel | None) -> None:
        theirs: dict[str, Tensor] = {}
        if source is not None:
            theirs = dict(source.named_parameters()) | dict(source.named_buffers())
        for name, mine in [*model.named_parameters(), *model.named_buffers()]:
            self._put(mine, theirs.get(name))

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor if self._group is None else self._group.whole(tensor)

    def _put(self, target: Tensor, whole: Tensor | None) -> None:
        if self._group is not None:
            self._group.put(target, whole)
        else:
            assert whole is not None
            target.copy_(whole)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copied(tensor: Tensor) -> Tensor:
    return _local(tensor.detach()).to("cpu", copy=True)
