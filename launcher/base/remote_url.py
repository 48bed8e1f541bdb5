"""May a URL be given as a setting? Settings are written to files and told to people."""

from __future__ import annotations

from urllib.parse import urlsplit


def problem_of(url: str) -> str:
    """Why a URL can't be given, without showing it; "" if it can. What is in a setting is written to files."""
    if "::" in url or "://" not in url:
        return "a URL such as s3://bucket/folder, gs://bucket/folder or file:///mnt/shared"
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment or parts.password:
        return "without credentials, '?' or '#': they belong in the environment or their usual files, as this is logged"
    return ""
