"""Draws how far each tensor of a model moved, in the model's own order."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from launcher.reporting.png_figure import FAINT_INK, GRID, INK, REWARD_COLOUR, TROUBLE_COLOUR, hide_spines, write_png
from scripts.checkpoints.comparison import FAR, Comparison, sentence

LEAST = 1e-9
"""What is drawn for 0, on a scale that has none."""


def draw_distances(found: Comparison, path: Path) -> None:
    """Raises JournalError where it can't be drawn or written."""
    write_png(partial(_draw, found=found), path, remedy="give another --png", figsize=(10, 4.2), dpi=130)


def _draw(figure: Any, *, found: Comparison) -> None:
    axes = figure.add_axes((0.08, 0.16, 0.89, 0.68))
    heights = [one.distance if math.isfinite(one.distance) else 1.0 for one in found.tensors]
    colours = [
        REWARD_COLOUR if math.isfinite(d.distance) and d.distance < FAR else TROUBLE_COLOUR for d in found.tensors
    ]
    axes.scatter(range(len(heights)), [max(height, LEAST) for height in heights], s=14, c=colours, linewidths=0)
    axes.axhline(FAR, color=TROUBLE_COLOUR, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_yscale("log")
    axes.set_xlabel(f"{len(heights)} tensors, in the order of the model", color=FAINT_INK, fontsize=9)
    axes.set_ylabel("distance, of its own norm", color=FAINT_INK, fontsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(colors=FAINT_INK, labelsize=8, length=0)
    hide_spines(axes, but="bottom", colour=GRID)
    axes.set_title(f"{found.a.name} → {found.b.name}", loc="left", color=INK, fontsize=11, pad=18)
    figure.text(0.08, 0.87, sentence(found)[:150], color=FAINT_INK, fontsize=8)
