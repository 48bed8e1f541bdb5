"""The launcher's own command on stand-in servers that take the memory of their token pools: 50 kB for each token.

`python -m tests.programs.sweep_run [-m] conf=… key=value …`
"""

import functools
import sys

from launcher.__main__ import main
from tests.programs.supervised_run import STAND_IN

POOL = ("--bytes-per-token", "50000")


def on_stand_ins() -> None:
    from launcher import driver  # brings Ray and torch along, of which a sweep has none

    driver.run = functools.partial(driver.run, server_entry=(*STAND_IN, *POOL))


if __name__ == "__main__":
    if "-m" not in sys.argv[1:]:
        on_stand_ins()
    sys.exit(main(("-m", "tests.programs.sweep_run")))
