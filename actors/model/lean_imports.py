"""Importing torch and transformers, and what is built with them, in half the processor time.

transformers imports what it finds installed, for parts of it that nobody here uses: sklearn (and with it pandas) for
a way of speculative decoding, scipy for losses of object detection, torchao for quantised models. Inside the block
they are said to be absent, which transformers takes for an answer. Nothing is garbage while importing, yet looking for
it took a quarter of the time; and what was imported stays, so later collections need not look at it either: half a
million objects, 0.2 s each time, in the midst of a step.

Measured on two busy cores, three times, `import actors.training.training`: 8.5 to 9.8 s of processor time, 3.3 to 7.5 s
inside.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NEEDLESS = ("scipy", "sklearn", "torchao")


@contextmanager
def lean_imports() -> Iterator[None]:
    """For a process of our own, once, around its imports and what lives as long as it does."""
    hidden = [name for name in NEEDLESS if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # documented: importing it raises ModuleNotFoundError
    gc.disable()
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        gc.enable()
