"""The launcher's own command on stand-in servers that take the memory of their token pools: 50 kB for each token.

`python -m tests.programs.sweep_run [-m] conf=… key=value …`
"""

import sys

from launcher import driver_process
from launcher.__main__ import main
from launcher.cli import keeper
from tests.programs.supervised_run import STAND_IN

POOL = ("--bytes-per-token", "50000")


if __name__ == "__main__":
    if sys.argv[-1].startswith(keeper.TASK):
        sys.exit(driver_process.main((*STAND_IN, *POOL)))
    keeper.DRIVER = ("-m", "tests.programs.sweep_run")
    sys.exit(main(("-m", "tests.programs.sweep_run")))
