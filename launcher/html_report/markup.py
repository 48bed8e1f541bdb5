"""HTML and SVG that text can't break out of: whatever isn't Markup is escaped, wherever it is put.

Names, reasons and log lines are written by others; a page that is opened in a browser must show them and never run
them. So there is one way to make an element, `tag`, and no template into which text is pasted.
"""

from __future__ import annotations

import html
import re

UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ufffe\uffff]|[\ud800-\udfff]")
"""Control characters, what turns the direction of the text around, and halves of surrogate pairs."""
VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is HTML already. Made by `tag` and `join` alone."""

    __slots__ = ()


NOTHING = Markup("")


def text(value: object) -> Markup:
    """`value` as text of an element or of an attribute."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(UNSHOWN.sub("\ufffd", str(value)), quote=True))


def join(*children: object) -> Markup:
    return Markup("".join(map(text, children)))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. `class_` is the attribute class, `stroke_width` stroke-width; None and False leave one out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_number(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{join(*children)}</{name}>")


def _number(value: object) -> object:
    """Coordinates to a tenth of a pixel: more digits are bytes that nobody sees."""
    if isinstance(value, float):
        return f"{value:.1f}".rstrip("0").rstrip(".")
    return value
