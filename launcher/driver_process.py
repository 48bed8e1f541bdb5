"""The process of one attempt, started by the keeper (launcher/cli/keeper.py): `python -m launcher.driver_process TASK`.

It listens to signals before it imports anything that takes long, and has the settings that the command wrote down: no
preset is read and nothing is fitted anew, so that one which is edited meanwhile changes no run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from launcher.base.errors import LauncherError
from launcher.base.exit_codes import EXIT_CODES
from launcher.base.messages import TerminalStatus
from launcher.cli.interrupts import Interrupts
from launcher.cli.keeper import DriverTask


def main(server_entry: tuple[str, ...] | None = None) -> int:
    """The exit code, for the keeper. `server_entry`: in SGLang's place, for tests."""
    try:  # around the whole: a signal that was held back comes as soon as anybody listens
        with Interrupts(ends_at_once=True, keeper=os.getppid()) as interrupts:
            task = DriverTask.read(sys.argv[-1])
            os.set_inheritable(task.lock, False)  # a server that outlives its driver must not keep the run locked
            sys.argv[1:] = task.words
            sys.path[:] = task.path
            return drive(task, interrupts, server_entry)
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("ended by Ctrl-C", file=sys.stderr)
        return EXIT_CODES[TerminalStatus.ABORTED]


def drive(task: DriverTask, interrupts: Interrupts, server_entry: tuple[str, ...] | None = None) -> int:
    """Raises LauncherError where the run can't begin, or not go on. Then it has ended with a status (P9)."""
    from launcher.cli.run_end import close_as_recorded, ends_the_run, own_end
    from launcher.config.foreign import OWN
    from launcher.resources.hardware import find_hardware, of_the_run
    from launcher.resources.missing_files import find_shape
    from launcher.resources.run_plan import make_plan, with_standby_trainer
    from launcher.run_files.run_paths import RunPaths
    from launcher.run_files.written_settings import read_config

    paths = RunPaths.of_logs(Path(task.logs))
    assert paths is not None, "the keeper has it from the run's own paths"
    if task.before is not None and (end := own_end(paths, task.first_attempt)) is not None:
        return close_as_recorded(paths, end)
    with contextlib.nullcontext() if task.before is None else ends_the_run(paths):
        config, plan = read_config(paths.settings), None
        if config.trainer.adapter == OWN:
            hardware = of_the_run(config, find_hardware())
            plan = with_standby_trainer(config, hardware, make_plan(config, hardware, find_shape(config)))
        from launcher.driver import run  # brings Ray along
    return run(config, server_entry=server_entry, task=task, plan=plan, interrupts=interrupts)


if __name__ == "__main__":
    sys.exit(main())
