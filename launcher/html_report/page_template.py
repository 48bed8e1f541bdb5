"""Fills the Jinja2 templates of the HTML pages: every value is escaped, a missing one is an error.

Names, reasons and log lines are written by others; a page that is opened in a browser must show them and never run
them. So the templates escape whatever is put into them, and the page's policy lets no script run but `refresh.js`.
What would turn the reading direction or show nothing is written as in a terminal.
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from launcher.reporting import formats
from launcher.reporting.terminal_text import visible

TEMPLATES = Path(__file__).parent
FRAME, MACROS = TEMPLATES / "page.html.j2", TEMPLATES / "macros.html.j2"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render_page(template: Path, *, script: Path | None = None, **values: object) -> bytes:
    """The page as a file's content. `script`: the only one that may run in it."""
    code, policy = "", POLICY
    if script is not None:
        code = script.read_text()
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    page = load_template(template)
    return visible(page.render(values, policy=policy, script=Markup(code))).encode()


@lru_cache
def load_template(template: Path) -> Template:
    """Compiled; the first time takes as long as several pages."""
    return _environment(template.parent).get_template(template.name)


@lru_cache
def _environment(folder: Path) -> Environment:
    made = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(seconds=formats.seconds, spread=formats.spread, when=formats.when)
    return made
