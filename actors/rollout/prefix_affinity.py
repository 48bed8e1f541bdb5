"""Which server was last asked for each prompt, and so may have its prefix in its cache."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from launcher.base.messages import ServerInfo

MOST = 100_000
"""Prompts remembered; the longest unasked is forgotten first. Some 20 MB."""


@dataclass(frozen=True, slots=True)
class _Home:
    name: str
    generation: int
    weights: tuple[int | None, int | None]


class PrefixAffinity:
    """`prompt` is any key that is the prompt's own; "" is nobody's."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, _Home] = OrderedDict()

    def asked(self, prompt: str, server: ServerInfo) -> None:
        if not prompt:
            return
        self._homes[prompt] = _Home(server.name, server.generation, (server.weight_version, server.lineage))
        self._homes.move_to_end(prompt)
        if len(self._homes) > MOST:
            self._homes.popitem(last=False)

    def is_home(self, prompt: str, server: ServerInfo) -> bool:
        home = self._homes.get(prompt)
        return home is not None and home.name == server.name

    def is_warm(self, prompt: str, server: ServerInfo) -> bool:
        """The same life at the same weights: neither a restart nor an update has emptied its cache since."""
        home = self._homes.get(prompt)
        return home == _Home(server.name, server.generation, (server.weight_version, server.lineage))
