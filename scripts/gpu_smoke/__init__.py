"""The command `python -m scripts.gpu_smoke` (docs/gpu.md). It is in the laboratory, and so not in the wheel."""

from scripts.lab.gpu_smoke import main, parser

__all__ = ["main", "parser"]
