"""The page as one file: its style, its scripts and uPlot in it, and the facts of a run as JSON, or none.

Names, reasons and log lines are written by others. They are in the JSON alone, in which no `<` is left, and the scripts
make text of them and never markup. The policy lets no other script and no other style work, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import orjson

from launcher.run_files.journal import encode

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("uplot/uPlot.iife.min.js", "dom.js", "source.js", "charts.js", "heads.js", "details.js", "page.js")
STYLES = ("uplot/uPlot.min.css", "page.css")


def render_page(facts: Mapping[str, object] | None) -> bytes:
    """`facts`: of `page_facts`, with what report.html adds; None: the page asks its server for them."""
    before, after = _shell(is_served=facts is None)
    return before + (b"null" if facts is None else to_json(facts).replace(b"<", b"\\u003c")) + after


def to_json(content: Mapping[str, object]) -> bytes:
    """What is no finite number is null."""
    try:
        return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # half a surrogate pair, or an integer of more than 64 bits, that another program wrote
        return encode(content)


def policy(*, is_served: bool) -> str:
    """Content-Security-Policy: a file asks nobody for anything, a served page its own server alone."""
    asks = "'self'" if is_served else "'none'"
    return (
        f"default-src 'none'; script-src {_digest(_joined(SCRIPTS))}; style-src {_digest(_joined(STYLES))}; "
        f"connect-src {asks}; img-src data:; base-uri 'none'; form-action 'none'"
    )


@lru_cache
def _shell(*, is_served: bool) -> tuple[bytes, bytes]:
    """What stands before the facts and after them."""
    parts = {"policy": policy(is_served=is_served), "style": _joined(STYLES), "script": _joined(SCRIPTS)}
    whole = re.sub(r"\{\{(policy|style|script)\}\}", lambda found: parts[found[1]], (STATIC / "page.html").read_text())
    before, _, after = whole.partition("{{facts}}")
    return before.encode(), after.encode()


@lru_cache
def _joined(names: tuple[str, ...]) -> str:
    return "\n".join((STATIC / name).read_text() for name in names)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
