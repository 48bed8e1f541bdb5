"""Imports torch and transformers in two thirds of the processor time, or less.

transformers imports optional packages that it finds, for parts that are not used here: images and sound, several
devices for one model, sklearn (with pandas). Inside the block they are hidden. Garbage collection, which took a quarter
of the time and finds nothing while importing, is off; the imported objects are then exempt from later collections (half
a million objects, 0.2 s each time).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NEEDLESS = ("PIL", "accelerate", "scipy", "sklearn", "torchao", "torchaudio", "torchvision")


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
            if sys.modules.get(name, name) is None:  # else it was shown
                del sys.modules[name]
        gc.freeze()
        gc.enable()


def show(package: str) -> None:
    """`package` can be imported again within `lean_imports`: something needs it after all."""
    if sys.modules.get(package, package) is None:
        del sys.modules[package]


class LowPriorityImport:
    """Imports `module` in a thread of its own, whose priority ends with it: without a privilege it can't be raised.

    `niceness`: above this process's; 0 changes nothing.
    """

    def __init__(self, module: str, niceness: int) -> None:
        self._module, self._niceness = module, niceness
        self._failed: ImportError | None = None
        self._thread = threading.Thread(target=self._work, name="imports")

    def run(self) -> None:
        """Once. Raises ImportError."""
        self._thread.start()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def hurry(self) -> bool:
        """Give what is left of it the usual priority; whether that was allowed (CAP_SYS_NICE) or isn't needed."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if self._thread.native_id is not None and self._thread.is_alive():
                usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
                try:
                    os.setpriority(os.PRIO_PROCESS, self._thread.native_id, usual)
                except PermissionError:
                    return False
        return True

    def _work(self) -> None:
        os.nice(self._niceness)  # on Linux of the calling thread
        try:
            importlib.import_module(self._module)
        except ImportError as error:
            self._failed = error
