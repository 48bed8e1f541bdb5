"""What Ray books at once for a run: bundles, each whole on one node, from seats that are placed. Pure.

Together are: the seats that share a GPU, since Ray gives two halves of one GPU only within one bundle; and with
`cluster.placement=PACK` the trainer ranks of one node, which talk to each other all the time. Everything else is a
bundle of its own, so that a server that has lost its node can come up wherever one server fits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from launcher.resources.capacity import RANK, ProcessPlacement

EMPTY = 0.001
"""CPUs of a bundle for seats that book none: Ray knows no empty one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """`seats` are names; `node` is the plan's."""

    seats: tuple[str, ...]
    node: int
    gpus: int
    cpus: float

    @property
    def resources(self) -> dict[str, float]:
        """As Ray takes them."""
        amounts = {"GPU": float(self.gpus), "CPU": float(self.cpus)}
        return {kind: amount for kind, amount in amounts.items() if amount > 0} or {"CPU": EMPTY}


def bundles(seats: Sequence[ProcessPlacement], *, strategy: str) -> tuple[Bundle, ...]:
    """Every seat in exactly one bundle."""
    together: dict[Hashable, list[ProcessPlacement]] = {}
    for seat in seats:
        together.setdefault(_with_whom(seat, strategy), []).append(seat)
    return tuple(_bundle(group) for group in together.values())


def _with_whom(seat: ProcessPlacement, strategy: str) -> Hashable:
    if seat.gpus and seat.share < 1:
        return ("gpu", seat.node, seat.gpus[0])
    if seat.kind == RANK and strategy == "PACK":
        return ("ranks", seat.node)
    return seat.name


def _bundle(group: Sequence[ProcessPlacement]) -> Bundle:
    gpus = {gpu for seat in group for gpu in seat.gpus}
    return Bundle(
        seats=tuple(seat.name for seat in group),
        node=group[0].node,
        gpus=len(gpus),
        cpus=sum(seat.cpus for seat in group),
    )
