"""Which addresses mean every interface of a machine."""

from __future__ import annotations

import socket


def is_everywhere(host: str) -> bool:
    """Whether to listen on `host` would be to listen on all: 0.0.0.0, ::, 0, "" and their other spellings.

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
