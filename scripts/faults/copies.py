"""What an injector must not end: the last good copy of anything, unless told to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

ENDS_TRAINER = frozenset({"T1", "T2", "T6", "T7", "D1", "N1", "M2"})
ENDS_SERVER = frozenset({"C1", "C2", "C3", "D1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """How many there are. `whole_checkpoints` were proven by their hashes; counting may stop at two."""

    whole_checkpoints: int
    live_servers: int
    raylets: int


def last_copy(kind: str, copies: Copies, *, keep_one: bool) -> str:
    """Why a fault of `kind` would end a last copy; empty where it would not."""
    if kind == "T4" and copies.whole_checkpoints < 2:
        return f"{copies.whole_checkpoints} whole checkpoint(s): T4 would leave none"
    if kind in ENDS_TRAINER | {"T5"} and copies.whole_checkpoints < 1:
        return "there is no whole checkpoint yet: the trainer's process holds the only copy of what was learned"
    if kind == "N1" and copies.raylets < 2:
        return "this is the only node of the run that is known here: its raylet's end is the run's"
    if keep_one and kind == "C7":
        return "C7 ends every server, and --keep-one asks for one to stay"
    if keep_one and kind in ENDS_SERVER and copies.live_servers < 2:
        return f"{copies.live_servers} server(s) generate, and --keep-one asks for one to stay"
    return ""
