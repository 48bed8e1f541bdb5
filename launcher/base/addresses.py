"""Free ports, and checks of addresses and URLs that are given as settings: they are written to files and shown."""

from __future__ import annotations

import errno
import random
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

ABOVE_RAY = 20_000
"""Ray's workers take ports from 10,002 to 19,999."""
USUALLY_GIVEN = 32_768
GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
ENOUGH = 1000
"""Ports to draw from; fewer may all be taken."""
TRIES = 100
PORT = r"[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5]"
CLUSTER_ADDRESS = (rf"local|auto|[^\s:/]+:({PORT})", "local, auto, or ip:port; IPv4 or a name, no IPv6")
"""Of a Ray cluster: what it matches, and that in words."""


def free_port(host: str = "", *, following: int = 1) -> int:
    """A port of `host` ("": of every address) that is free, with those `following` it, for who listens there later.

    It is below those that the kernel gives to whoever asks for any: one of them may be somebody's connection by then.
    Raises OSError where `host` isn't this machine's, or where every port that was tried is taken.
    """
    given = int(GIVEN.read_text().split()[0]) if GIVEN.exists() else USUALLY_GIVEN
    end = (given if given - ABOVE_RAY >= ENOUGH else USUALLY_GIVEN) - following
    draw = random.SystemRandom()
    tries_left = TRIES
    while True:
        tries_left -= 1
        first = draw.randrange(ABOVE_RAY, end)
        try:
            with ExitStack() as held:
                for port in range(first, first + following):
                    held.enter_context(bound(host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not tries_left:
                raise
        else:
            return first


def bound(host: str, port: int) -> socket.socket:
    """A socket of that port, which only a listener can have taken. Raises OSError."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except BaseException:
        made.close()
        raise
    return made


def is_every_interface(host: str) -> bool:
    """Whether to listen on `host` would be to listen on all interfaces: 0.0.0.0, ::, 0, "" and other spellings.

    Numbers alone are understood; no name is looked up.
    """
    text = host.strip().strip("[]")
    if text in {"", "*"}:
        return True
    try:
        found = socket.getaddrinfo(text, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        return False
    return any(str(address[4][0]).partition("%")[0] in {"0.0.0.0", "::", "::ffff:0.0.0.0"} for address in found)


def url_problem(url: str) -> str:
    """Why this can't be the URL of a setting, without showing it; "" if it can."""
    if "::" in url or "://" not in url:
        return "a URL such as s3://bucket/folder, gs://bucket/folder or file:///mnt/shared"
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment or parts.password:
        return "without credentials, '?' or '#': they belong in the environment or their usual files, as this is logged"
    return ""
