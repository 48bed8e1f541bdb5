"""Checks of addresses and URLs that are given as settings, which are written to files and shown to people."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


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
