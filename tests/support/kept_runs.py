"""The processes of a run that has a keeper, for tests that kill them."""

import contextlib
import signal

import psutil

from launcher.cli import keeper


def driver_of(pid: int) -> psutil.Process:
    """The driver of the keeper `pid`. Raises LookupError where it has none at the moment."""
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # it ends
            if "".join(child.cmdline()[-1:]).startswith(keeper.TASK):
                return child
    raise LookupError(f"the keeper {pid} has no driver now")


def kill_command(pid: int) -> None:
    """Keeper and driver at once, as the end of their machine does: neither saves, nor begins anything."""
    command = psutil.Process(pid)
    command.send_signal(signal.SIGSTOP)
    driver_of(pid).kill()
    command.kill()
