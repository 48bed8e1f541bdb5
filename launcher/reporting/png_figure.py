"""The common parts of the PNG pictures: colours, a matplotlib figure, and writing it atomically."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.base.durable import replace_file
from launcher.base.errors import JournalError

INK, FAINT_INK, GRID = "#1f2430", "#6b7280", "#e5e7eb"
REWARD_COLOUR, SAMPLED_COLOUR, GREEDY_COLOUR, TROUBLE_COLOUR = "#2563eb", "#d97706", "#059669", "#dc2626"


def write_png(draw: Callable[[Any], None], path: Path, *, remedy: str, **settings: Any) -> None:
    """`draw` gets the figure that `settings` make. Raises JournalError where it can't be drawn or written."""
    try:
        from matplotlib.figure import Figure  # takes half a second, and only a run that ends has need of it

        figure = Figure(facecolor="white", **settings)
        draw(figure)
        data = io.BytesIO()
        figure.savefig(data, format="png")
        replace_file(path, data.getvalue())
    except (ImportError, OSError) as error:
        raise JournalError(f"{path} was not written: {error}", remedy) from error


def hide_spines(axes: Any, *, but: str, colour: str) -> None:
    """Only the line along one side stays."""
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(side == but)
    axes.spines[but].set_color(colour)
