"""Imports torch and transformers in half the processor time.

transformers imports optional packages that it finds, for parts that are not used here: sklearn (with pandas), scipy,
torchao. Inside the block they are hidden. Garbage collection, which took a quarter of the time and finds nothing while
importing, is off; the imported objects are then exempt from later collections (half a million objects, 0.2 s each
time).

Measured on two busy cores, three times, `import actors.training.training`: 8.5 to 9.8 s of processor time, 3.3 to 7.5 s
inside.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOWEST = 19
NEEDLESS = ("scipy", "sklearn", "torchao")


@contextmanager
def lean_imports() -> Iterator[None]:
    """Use it once in a process, around its imports and the objects that last as long as it does."""
    hidden = [name for name in NEEDLESS if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # documented: importing it raises ModuleNotFoundError
    gc.disable()
    try:
        yield
    finally:
        for name in hidden:
            if sys.modules.get(name, name) is None:  # else it was needed after all (actors/model/optimizer.py)
                del sys.modules[name]
        gc.freeze()
        gc.enable()


def import_at_low_priority(module: str) -> None:
    """In a thread of its own, whose priority ends with it: without a privilege it can't be raised again. Raises
    ImportError."""
    failed: list[ImportError] = []

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        try:
            importlib.import_module(module)
        except ImportError as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="imports")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
