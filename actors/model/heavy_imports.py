"""The imports of torch and transformers, which take seconds: without garbage collection, and at a lower priority where
a parked trainer makes them beside one that steps."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Use it once in a process, around its imports and the objects that last as long as it does.

    While importing, garbage collection takes a sixth of the time and finds nothing. Afterwards these objects are exempt
    from it: there are half a million of them, 0.2 s in each full collection.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class LowPriorityImport:
    """Imports `module` in a thread of its own, whose priority ends with it: without a privilege it can't be raised.

    `niceness`: above this process's; 0 changes nothing.
    """

    def __init__(self, module: str, niceness: int) -> None:
        self._module = module
        self._niceness = niceness
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
