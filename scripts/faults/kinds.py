"""All kinds of faults: those that the modules of this folder declare, and those that are out of reach."""

from __future__ import annotations

from scripts.faults import declaration as declared
from scripts.faults import (
    disk_faults,
    gpu_faults,
    memory_faults,
    reward_faults,
    run_faults,
    server_faults,
    trainer_faults,
)

DECLARED_IN = (
    *(server_faults, trainer_faults, disk_faults, memory_faults),
    *(gpu_faults, reward_faults, run_faults),
)
OUT_OF_REACH = (
    declared.FaultKind(
        id="S4",
        what="policy collapse: learning rate × 20",
        out_of_reach="a run takes no new learning rate from outside; start one with a higher actor.optimizer.lr",
    ),
    declared.FaultKind(
        id="X-hard",
        what="trap: a harder batch",
        out_of_reach="a reward function that is made stricter is broken for known answers too, so that an alarm "
        "would be right; start a run on harder records (train_dataset.path) instead",
    ),
)
LETTERS = "CTSMNDX"


def code_place(code: str) -> tuple[int, int, str]:
    """By letter, then by number: C10 comes after C9."""
    return LETTERS.index(code[0]), int(code[1:]) if code[1:].isdigit() else 0, code


KINDS = {
    kind.id: kind for kind in sorted((*declared.KINDS.values(), *OUT_OF_REACH), key=lambda kind: code_place(kind.id))
}
NEEDS = {"switch": " [needs the switched reward function]", "": ""}


def describe() -> str:
    """All kinds with their options, for `--list`."""
    lines = []
    for kind in KINDS.values():
        lines.append(f"{kind.id:9}{kind.what}{NEEDS[kind.needs]}")
        if kind.out_of_reach:
            lines.append(f"{'':11}can't be injected: {kind.out_of_reach}")
        for name, option in kind.options.items():
            allowed = f" ({'|'.join(option.choices)})" if option.choices else ""
            shown = option.default if isinstance(option.default, str) else f"{option.default:g}"
            lines.append(f"{'':11}{name}={shown}  {option.meaning}{allowed}")
    return "\n".join(lines)
