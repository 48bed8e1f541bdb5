"""The launcher's own command on stand-in servers, whose machine has room for 6000 tokens of their pools.

`python -m tests.sweep_run [-m] conf=… key=value …`
"""

import functools
import sys

from launcher.__main__ import main
from tests.supervised_run import STAND_IN

ROOM = ("--out-of-memory-above", "6000")


def on_stand_ins() -> None:
    from launcher import driver  # brings Ray and torch along, of which a sweep has none

    driver.run = functools.partial(driver.run, server_entry=(*STAND_IN, *ROOM))


if __name__ == "__main__":
    if "-m" not in sys.argv[1:]:
        on_stand_ins()
    sys.exit(main(("-m", "tests.sweep_run")))
