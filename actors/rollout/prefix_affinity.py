"""Which server was last asked for each prompt, and so may have its prefix in its cache."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from launcher.base.messages import ServerInfo

MOST = 100_000
"""Prompts remembered, about 20 MB; the least recently asked is forgotten first."""


@dataclass(frozen=True, slots=True)
class _Home:
    name: str
    generation: int
    weights: tuple[int | None, int | None]


class PrefixAffinity:
    """`prompt` is the prompt's id; "" is not remembered."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, _Home] = OrderedDict()

    def asked(self, prompt: str, server: ServerInfo) -> None:
        if not prompt:
            return
        self._homes[prompt] = _Home(server.name, server.generation, (server.weight_version, server.lineage))
        self._homes.move_to_end(prompt)
        if len(self._homes) > MOST:
            self._homes.popitem(last=False)

    def home(self, prompt: str) -> str:
        """The name of the server that was last asked for this prompt, "" where none was."""
        home = self._homes.get(prompt)
        return "" if home is None else home.name

    def is_warm(self, prompt: str, server: ServerInfo) -> bool:
        """Whether neither a restart nor a weight update has emptied its cache since."""
        home = self._homes.get(prompt)
        return home == _Home(server.name, server.generation, (server.weight_version, server.lineage))
