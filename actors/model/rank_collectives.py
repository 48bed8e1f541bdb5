"""The process group of the trainer's ranks: how they meet, and their collective operations (FSDP2).

Each rank holds a slice of every weight, its gradient and its moments. A layer is gathered when it runs and resharded
afterwards; gradients are summed, each rank keeping its slice. All ranks run every operation in the same order: a rank
that is alone in one waits until its deadline.

Rank 0 opens a store on one address of its machine, on a free port, under a name that is new for each incarnation. A
rank of an earlier incarnation knows neither, so no rank exists twice. CPU: gloo. GPU: NCCL, which has not been run.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from actors.model.token_logprobs import LogprobModel
from actors.serving.group_address import interface_with
from launcher.base.errors import TrainerError

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the `size` ranks of one incarnation meet. `timeout_s`: of each operation, the first included."""

    address: str
    port: int
    name: str
    size: int
    timeout_s: float


class MeetingPlace:
    """Rank 0's store. It listens on `address` only, as long as this object exists."""

    def __init__(self, address: str, *, size: int, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        self.rendezvous = Rendezvous(
            address=address, port=port, name=secrets.token_hex(16), size=size, timeout_s=timeout_s
        )
        self.store = TCPStore(  # by itself it would listen on every interface
            address,
            port,
            size,
            is_master=True,
            timeout=_seconds(timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class RankGroup:
    """One rank's side of the collective operations. One in a process. `mesh` None: a rank alone, which has all of
    everything: each operation leaves its tensor as it is."""

    def __init__(self, device: torch.device, *, rank: int = 0, mesh: DeviceMesh | None = None) -> None:
        self.size = 1 if mesh is None else mesh.size()
        self.rank = rank
        self._device = device
        self._mesh = mesh

    @classmethod
    def join(
        cls,
        rendezvous: Rendezvous,
        rank: int,
        *,
        own_address: str,
        device: torch.device,
        place: MeetingPlace | None = None,
    ) -> RankGroup:
        """Returns when all ranks have joined. `place` is rank 0's. Raises TrainerError."""
        interface = interface_of(own_address)
        for variable in INTERFACE_VARIABLES:
            os.environ[variable] = interface
        if dist.is_initialized():  # of a start that failed half-way
            dist.destroy_process_group()
        timeout = _seconds(rendezvous.timeout_s)
        try:
            if place is None:
                store = TCPStore(rendezvous.address, rendezvous.port, rendezvous.size, is_master=False, timeout=timeout)
            else:
                store = place.store
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore(rendezvous.name, store),
                rank=rank,
                world_size=rendezvous.size,
                timeout=timeout,
            )
            mesh = init_device_mesh(device.type, (rendezvous.size,))
        except (RuntimeError, ValueError) as error:  # torch's own kinds of failure are RuntimeErrors
            raise TrainerError(f"trainer rank {rank} could not meet the others: {error}") from error
        return cls(device, rank=rank, mesh=mesh)

    # ── collective operations ──

    def shard(self, model: LogprobModel, *, in_bfloat16: bool = False) -> None:
        """Keep one slice of each weight of `model`, which is moved to the device layer by layer."""
        assert self._mesh is not None, "a rank alone holds the model itself"
        sharded(model, self._mesh, in_bfloat16=in_bfloat16)

    def whole(self, tensor: Tensor) -> Tensor:
        """All slices of it together, in the host's memory of rank 0; nothing on the others. Alone: itself."""
        if self._mesh is None:
            return tensor
        together = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return together.cpu() if self.rank == 0 else together.new_empty(0)

    def put(self, target: Tensor, whole: Tensor | None) -> None:
        """Set `target` to what rank 0 has, each rank its slice. Others pass None."""
        if self._mesh is None:
            assert whole is not None, "there is nobody to have it from"
            target.copy_(whole)
            return
        if whole is None:
            whole = torch.empty(target.shape, dtype=target.dtype, device=self._device)
        else:
            whole = whole.to(device=self._device, dtype=target.dtype).contiguous()
        if isinstance(target, DTensor):
            slices = distribute_tensor(whole, self._mesh, target.placements, src_data_rank=0)
            target.to_local().copy_(slices.to_local())
        else:
            dist.broadcast(whole, src=0)
            target.copy_(whole)

    def total(self, tensor: Tensor) -> Tensor:
        if self._mesh is not None:
            dist.all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        if self._mesh is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor


def sharded(model: LogprobModel, mesh: DeviceMesh, *, in_bfloat16: bool) -> None:
    """Keep one slice of each of its weights.

    What is around the layers is given back after a forward pass too: a pass without a gradient would else leave
    it in memory, as it was before the next step. `in_bfloat16`: so they are gathered; slices, sums of gradients and
    what runs from layer to layer stay float32, as under autocast without it.
    """
    mixed = MixedPrecisionPolicy()
    if in_bfloat16:
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        model.model.get_input_embeddings().register_forward_hook(lambda module, ids, embedded: embedded.float())
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=mixed)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # a loss is weighted over the full batch: gradients are sums, not means
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def interface_of(address: str) -> str:
    """The name of the interface of this machine that bears `address`. Raises TrainerError."""
    if (name := interface_with(address)) is None:
        raise TrainerError(f"no network interface of {socket.gethostname()} has the address {address}")
    return name


def _seconds(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
