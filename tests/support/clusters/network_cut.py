"""Two network namespaces on this machine and one cable between them that a test can pull. Needs root.

with TwoNetworks() as networks:
    networks.enter(0), networks.ip(0)        before a command there; its address
    with networks.cut():                     nothing passes, nobody is told
"""

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator


def is_possible() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"grpo{secrets.token_hex(4)}p"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return made


class TwoNetworks:
    def __init__(self) -> None:
        mark = secrets.token_hex(4)
        self._names = (f"grpo{mark}a", f"grpo{mark}b")
        self._links = (f"gv{mark}a", f"gv{mark}b")

    def ip(self, which: int) -> str:
        return f"10.77.0.{which + 1}"

    def enter(self, which: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._names[which])

    def __enter__(self) -> "TwoNetworks":
        for name in self._names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", self._links[0], "type", "veth", "peer", "name", self._links[1])
        for which, (name, link) in enumerate(zip(self._names, self._links, strict=True)):
            _run("ip", "link", "set", link, "netns", name)
            _run(*self.enter(which), "ip", "link", "set", "lo", "up")
            _run(*self.enter(which), "ip", "addr", "add", f"{self.ip(which)}/24", "dev", link)
            _run(*self.enter(which), "ip", "link", "set", link, "up")
            _run(*self.enter(which), "ip", "route", "add", "default", "dev", link)
        return self

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Frames go to a machine that isn't there, so packets are lost in silence, as behind a broken switch: a link
        that is down would tell its own side."""
        for which in (0, 1):
            self._neighbour(which, "replace", "lladdr", NOBODY, "nud", "permanent")
        try:
            yield
        finally:
            for which in (0, 1):
                self._neighbour(which, "del")

    def _neighbour(self, which: int, do: str, *how: str) -> None:
        _run(*self.enter(which), "ip", "neigh", do, self.ip(1 - which), *how, "dev", self._links[which])

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False)


NOBODY = "02:00:00:00:00:99"


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
