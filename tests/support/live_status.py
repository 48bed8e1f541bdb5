"""A run that writes its now.json, as a live one does."""

import contextlib
import threading

BEAT_S = 0.02


@contextlib.contextmanager
def beating(file):
    """`file`, a CurrentStatusFile, is written again and again on a thread, until the block ends."""
    over = threading.Event()

    def beat():
        while not over.wait(BEAT_S):
            file.write()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
