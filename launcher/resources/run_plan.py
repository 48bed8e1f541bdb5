"""Plans a run from its configuration and the machine: which process is where, and how much memory each takes.

Pure: hardware and model sizes are arguments. Where the model's sizes are unknown (not there yet, and not a well-known
one), the plan reports that instead of guessing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from launcher.base.errors import UsageError
from launcher.base.findings import Finding, Severity
from launcher.base.wording import ranges
from launcher.checkpoints.model_shape import BYTES, ModelShape
from launcher.config.schema import RunConfig
from launcher.resources import memory_estimate
from launcher.resources.gpus import Gpu
from launcher.resources.hardware import Hardware, device_for
from launcher.resources.memory_estimate import GIB, RAY_HOST_BYTES, Item, checkpoint_bytes
from launcher.resources.placement import RANK, SERVER, ProcessPlacement, gpus_needed, node_name, place

WEIGHT_FOLDERS = 3
"""Versions that lie in memory at once while weights go to the servers as files: being written, served, left."""

HELD_BY_OTHERS = 2 * GIB
"""The driver itself keeps a little of every GPU."""

STANDBY = "standby"
STANDBY_KEY = "recovery.standby_trainers"

LARGEST_GPU_GIB = 512
ANY_MEMORY = 2**60

LESS_OF_A_GPU = (
    "lower sglang.mem_fraction_static or actor.mb_spec.max_tokens_per_mb, set actor.gradient_checkpointing=true; "
    "the trainer's part is divided by actor.dp_size"
)
LESS_OF_A_SERVER = "lower sglang.max_total_tokens, or take a smaller model (actor.path)"
LESS_OF_THE_HOST = (
    "lower sglang.max_total_tokens, sglang.n_servers, recovery.standby_trainers or rollout.max_head_offpolicyness "
    "(completions that wait, and weights, for each batch ahead); the trainer's part is divided by actor.dp_size"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """One process of the plan. `items` is empty where the model's sizes are unknown; bytes are for each of its GPUs."""

    placement: ProcessPlacement
    items: tuple[Item, ...]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlace:
    """One GPU or a node's host memory, in bytes: what it has, and what the plan puts there. `held`: what other
    processes hold of a GPU, where that is more than the driver keeps."""

    name: str
    node: int
    gpu: int | None
    capacity: int
    planned: int
    held: int = 0

    @property
    def headroom(self) -> int:
        return self.capacity - self.planned


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """`devices` are the servers' and the trainer's (`cuda` or `cpu`); `kv_tokens` is one server's token pool.

    `shortage`: what can't be placed on this hardware; the plan is then of what it would take. `is_described`: of nodes
    that aren't this machine.
    """

    devices: tuple[str, str]
    shape: ModelShape | None
    processes: tuple[PlannedProcess, ...]
    places: tuple[MemoryPlace, ...]
    n_nodes: int
    kv_tokens: int | None
    weight_files_bytes: int
    checkpoint_bytes: int
    shortage: UsageError | None
    is_described: bool
    notes: tuple[str, ...]
    gpus_needed: int
    standby_trainers: int = 0


def noted(plan: RunPlan, note: str) -> RunPlan:
    """With one more note; "": with none."""
    return dataclasses.replace(plan, notes=(*plan.notes, *([note] if note else [])))


def recommend_server(config: RunConfig, hardware: Hardware, plan: RunPlan) -> str:
    """One line where one more server fits beside what is planned, else "". Where several serve, the others go on with
    the completions of one that is lost. On a CPU its work takes time from the steps."""
    is_known = config.cluster.address == "local" or plan.is_described
    if plan.devices[0] == "cpu" or plan.shape is None or not is_known or why_not_run(plan):
        return ""
    more = config.sglang.n_servers + 1
    larger = dataclasses.replace(config, sglang=dataclasses.replace(config.sglang, n_servers=more))
    if why_not_run(make_plan(larger, hardware, plan.shape)):
        return ""
    return f"one more server has room (sglang.n_servers={more}): when one is lost, the others go on in its place"


def why_not_run(plan: RunPlan) -> str:
    """What the hardware lacks for the plan, in one sentence; "" where it fits."""
    return "; ".join([*([] if plan.shortage is None else [plan.shortage.message]), *map(str, lacks(plan))])


def make_plan(config: RunConfig, hardware: Hardware, shape: ModelShape | None) -> RunPlan:
    """The plan of a configuration that passed its checks, on this hardware."""
    devices = (device_for(config.sglang.device, hardware), device_for(config.actor.device, hardware))
    placed = place(config, servers_on=devices[0], trainer_on=devices[1], nodes=hardware.nodes(config))
    processes = tuple(
        PlannedProcess(placement=one, items=() if shape is None else _items(config, hardware, shape, one))
        for one in placed.processes
    )
    files = _weight_files(config, shape)
    return RunPlan(
        devices=devices,
        shape=shape,
        processes=processes,
        places=() if shape is None else tuple(_places(config, hardware, shape, processes)),
        n_nodes=hardware.n_nodes,
        kv_tokens=_kv_tokens(config, hardware, shape, devices[0]),
        weight_files_bytes=files,
        checkpoint_bytes=0 if shape is None else checkpoint_bytes(config.actor, shape),
        shortage=placed.shortage,
        is_described=hardware.is_described,
        notes=tuple(_notes(config, hardware, shape)),
        gpus_needed=placed.gpus,
    )


def _items(config: RunConfig, hardware: Hardware, shape: ModelShape, placement: ProcessPlacement) -> tuple[Item, ...]:
    if placement.kind == RANK:
        return memory_estimate.trainer(config, shape, on_gpu=bool(placement.gpus), rank=placement.index)
    if placement.gpus:
        return memory_estimate.server_on_gpu(config, shape, gpu_memory(hardware))
    return memory_estimate.server_on_cpu(config, shape)


def _places(
    config: RunConfig, hardware: Hardware, shape: ModelShape, processes: tuple[PlannedProcess, ...]
) -> Iterator[MemoryPlace]:
    """GPUs that something is on, and the memory of every node. The files of weights lie where rank 0 is."""
    kept = memory_estimate.kept_state_bytes(config, shape) + memory_estimate.ahead_bytes(config)
    files = _weight_files(config, shape)
    sent = memory_estimate.sent(config, shape, on_gpu=True).in_host
    first = next(process.placement.node for process in processes if process.placement.kind == RANK)
    for node in range(hardware.n_nodes):
        here = [process for process in processes if process.placement.node == node]
        where = f"{node_name(node)} " if hardware.n_nodes > 1 else ""
        for number, gpu in enumerate(hardware.gpus):
            planned = [process.bytes for process in here if number in process.placement.gpus]
            if planned:
                name = f"{where}GPU {number} ({gpu.name})"
                yield MemoryPlace(
                    name=name, node=node, gpu=number, capacity=gpu.free, planned=sum(planned), held=_held(gpu)
                )
        processes_here = sum(_host_bytes(process, kept, sent) for process in here)
        planned_here = RAY_HOST_BYTES + processes_here + (files if node == first else 0)
        yield MemoryPlace(
            name=f"{where}host memory", node=node, gpu=None, capacity=hardware.memory, planned=planned_here
        )


def _held(gpu: Gpu) -> int:
    held = gpu.memory - gpu.free
    return held if held > HELD_BY_OTHERS else 0


def _host_bytes(process: PlannedProcess, kept: int, sent: int) -> int:
    """On the CPU all of it; with a GPU the libraries still lie in the host's memory, and what rank 0 has `sent`."""
    if not process.placement.gpus:
        return process.bytes
    if process.placement.kind == RANK:
        return memory_estimate.TRAINER_HOST_BYTES + kept + (sent if process.placement.index == 0 else 0)
    return memory_estimate.SERVER_HOST_BYTES


def gpu_memory(hardware: Hardware) -> int:
    """Of the GPU with the least of it free: SGLang counts in what is free when it starts."""
    return min((gpu.free for gpu in hardware.gpus), default=0)


def _weight_files(config: RunConfig, shape: ModelShape | None) -> int:
    """Memory-backed storage that the way of new weights to the servers takes. Of several nodes, none sees another's
    memory: the files lie below `cluster.fileroot` then."""
    if shape is None or config.actor.weight_update_mode != "disk" or config.cluster.n_nodes > 1:
        return 0
    return _versions(config, shape)


def _versions(config: RunConfig, shape: ModelShape) -> int:
    return WEIGHT_FOLDERS * shape.parameters * BYTES[config.sglang.dtype]


def _kv_tokens(config: RunConfig, hardware: Hardware, shape: ModelShape | None, device: str) -> int | None:
    if device == "cpu":
        return config.sglang.max_total_tokens
    if shape is None or not hardware.gpus:
        return None
    room = memory_estimate.kv_cache_bytes(config, shape, gpu_memory(hardware))
    return max(0, room // shape.kv_bytes_on_each(config.sglang.dtype, config.sglang.tp_size)) * config.sglang.dp_size


def _notes(config: RunConfig, hardware: Hardware, shape: ModelShape | None) -> Iterator[str]:
    if shape is None:
        yield f"the sizes of {config.actor.path} are unknown until it is on this machine: no figures for memory"
    if config.hardware.gpu_memory_gib is not None:
        name = config.hardware.gpu_name or "a GPU"
        yield f"planned for {name} of {config.hardware.gpu_memory_gib:g} GiB (hardware.*)"
    if hardware.n_nodes > 1:
        per_node = f"{len(hardware.gpus)} GPUs, {hardware.cpus} CPUs, {hardware.memory / GIB:.0f} GiB each"
        source = (
            "(cluster.n_nodes, hardware.*)" if hardware.is_described else "like this machine (hardware.* is not set)"
        )
        yield f"planned for {hardware.n_nodes} nodes of {per_node} {source}"
    for number, gpu in enumerate(hardware.gpus):
        if held := _held(gpu):
            yield f"other processes hold {held / GIB:.1f} GiB of GPU {number}"
    if shape is not None and config.cluster.n_nodes > 1 and config.actor.weight_update_mode == "disk":
        files = f"{_versions(config, shape) / GIB:.1f} GiB, {WEIGHT_FOLDERS} versions"
        yield f"new weights go to the servers as files below cluster.fileroot: {files}"
    booked = config.sglang.n_servers * config.sglang.num_cpus + config.actor.dp_size * config.actor.num_cpus
    if booked > hardware.cpus and config.cluster.address == "local":
        yield f"{booked:g} CPUs are needed and {hardware.cpus} are there: the processes will take turns"


def smallest_gpu_gib(config: RunConfig, hardware: Hardware, shape: ModelShape) -> int | None:
    """Memory of the smallest GPU, in steps of 4 GiB, on which this configuration fits; None where none would do."""
    for gib in range(4, LARGEST_GPU_GIB + 1, 4):
        gpu = Gpu(name="GPU", memory=gib * GIB, free=gib * GIB)
        gpus = (gpu,) * gpus_needed(config)
        plan = make_plan(config, dataclasses.replace(hardware, gpus=gpus, memory=ANY_MEMORY, n_nodes=1), shape)
        if not lacks(plan):
            return gib
    return None


def lacks(plan: RunPlan) -> list[Finding]:
    """Memory that the plan needs and its hardware has not; empty where it fits."""
    problems = []
    if plan.shape is not None and plan.kv_tokens is not None and plan.kv_tokens < 1:
        no_cache = "its weights leave no room for its KV cache"
        on_each = plan.processes[0].items[0].bytes  # servers are first, and their weights
        fits_one = on_each < min(place.capacity for place in plan.places if place.gpu is not None)
        raise_it = "raise sglang.mem_fraction_static" if fits_one else "raise sglang.tp_size"
        problems.append(Finding(subject="a server", text=no_cache, level=Severity.BAD, hint=raise_it))
    for name, memory in group_places(plan.places):
        if memory.headroom < 0:
            text = f"{memory.planned / GIB:.1f} GiB are planned and {memory.capacity / GIB:.1f} GiB are there"
            if memory.held:
                holders = "(`python -m launcher doctor` has their pids)"
                text += f"; other processes hold {memory.held / GIB:.1f} GiB of it {holders}"
            hint = LESS_OF_THE_HOST if memory.gpu is None else LESS_OF_A_GPU
            if memory.gpu is None and (alone := _largest_server(plan)) > memory.capacity:
                text, hint = f"{text}; one server alone takes {alone / GIB:.1f} GiB", LESS_OF_A_SERVER
            problems.append(Finding(subject=name, text=text, level=Severity.BAD, hint=hint))
    return problems


def _largest_server(plan: RunPlan) -> int:
    """Bytes that it takes of a host's memory where it is on the CPU."""
    servers = (one for one in plan.processes if one.placement.kind == SERVER and not one.placement.gpus)
    return max((one.bytes for one in servers), default=0)


def group_places(places: Sequence[MemoryPlace]) -> list[tuple[str, MemoryPlace]]:
    """Neighbours on one node with the same memory and the same plan for it, under one name."""
    groups: dict[Hashable, list[MemoryPlace]] = {}
    for one in places:
        kind = one.name.rpartition("(")[2] if one.gpu is not None else ""
        groups.setdefault((one.node, one.gpu is None, kind, one.capacity, one.planned, one.held), []).append(one)
    return [(_group_name(group), group[0]) for group in groups.values()]


def _group_name(group: Sequence[MemoryPlace]) -> str:
    first = group[0]
    if first.gpu is None or len(group) == 1:
        return first.name
    numbers = ranges(place.gpu for place in group if place.gpu is not None)
    return first.name.replace(f"GPU {first.gpu} ", f"GPU {numbers} ", 1)


# ── the parked trainer ──


def with_standby_trainer(config: RunConfig, hardware: Hardware, plan: RunPlan) -> RunPlan:
    """The plan with one beside each rank, where it was asked for, or where it was left to the plan and has room."""
    wanted = config.recovery.standby_trainers
    if wanted == 0:
        return plan
    ranks = [process for process in plan.processes if process.placement.kind == RANK]
    parked = tuple(_beside(rank, config, plan) for rank in ranks)
    why_not = _why_no_standby(config, hardware, plan, parked)
    if wanted is None and why_not:
        return noted(plan, f"no trainer stands by: {why_not} ({STANDBY_KEY}=null)")
    places = tuple(dataclasses.replace(one, planned=one.planned + _bytes_on(one, parked)) for one in plan.places)
    how = "null: 1, as memory allows it" if wanted is None else "1"
    whose = "a second trainer process" if len(ranks) == 1 else f"a second process of each of {len(ranks)} trainer ranks"
    note = f"{whose}, parked once the trainer has loaded, takes over when the trainer ends ({STANDBY_KEY}={how})"
    processes = (*plan.processes, *parked)
    return dataclasses.replace(noted(plan, note), processes=processes, places=places, standby_trainers=1)


def _beside(rank: PlannedProcess, config: RunConfig, plan: RunPlan) -> PlannedProcess:
    on_gpu = bool(rank.placement.gpus)
    items = () if plan.shape is None else memory_estimate.standby_trainer(config, plan.shape, on_gpu=on_gpu)
    name = "standby trainer" if config.actor.dp_size == 1 else f"parked-{rank.placement.index}"
    placement = dataclasses.replace(rank.placement, name=name, kind=STANDBY, cpus=0, n_gpus=0, gpus=())
    return PlannedProcess(placement=placement, items=items)


def _why_no_standby(config: RunConfig, hardware: Hardware, plan: RunPlan, parked: tuple[PlannedProcess, ...]) -> str:
    if config.cluster.address != "local" and not plan.is_described:
        return "the memory of a running cluster's machines is not known here"
    hosts = [place for place in plan.places if _bytes_on(place, parked)]
    if not hosts:
        return "its memory is not known before the model is here"
    for host in hosts:
        left = host.headroom if plan.is_described else min(host.headroom, hardware.memory_free - host.planned)
        takes = _bytes_on(host, parked)
        if takes > left:
            if left < 0:
                return f"it takes {takes / GIB:.1f} GiB, and {-left / GIB:.1f} GiB are missing without it"
            return f"it takes {takes / GIB:.1f} GiB and {left / GIB:.1f} GiB are left"
    return ""


def _bytes_on(place: MemoryPlace, parked: tuple[PlannedProcess, ...]) -> int:
    """0 for a GPU: nothing is parked there."""
    return sum(one.bytes for one in parked if place.gpu is None and place.node == one.placement.node)
