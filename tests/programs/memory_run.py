"""A supervised run on a machine with room for some sizes of the servers' token pool only.

`python -m tests.programs.memory_run FILEROOT STEPS TOKENS [stand-in arguments]`
"""

import sys
from pathlib import Path

from launcher import driver
from tests.programs.supervised_run import STAND_IN, SupervisedRun, run_config


class MemoryRun(SupervisedRun):
    def __init__(self, fileroot: Path, *, steps: int, tokens: int, room: tuple[str, ...]) -> None:
        super().__init__(fileroot, steps=steps, servers=1)
        self._command = [
            sys.executable,
            "-m",
            "tests.programs.memory_run",
            str(fileroot),
            str(steps),
            str(tokens),
            *room,
        ]

    def overrides(self) -> list[dict]:
        """Of each restart, in order."""
        return [event["overrides"] for event in self.events("server.restarting")]


def main() -> None:
    fileroot, steps, tokens, *room = sys.argv[1:]
    config = run_config(fileroot, int(steps), 1)
    config.sglang.max_total_tokens = int(tokens)
    sys.exit(driver.run(config, server_entry=(*STAND_IN, *room)))


if __name__ == "__main__":
    main()
