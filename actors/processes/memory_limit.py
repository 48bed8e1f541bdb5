"""Runs a command under a memory limit: `python -S -m actors.processes.memory_limit BYTES command …`.

RLIMIT_DATA limits the private writable memory of each process, heap and thread stacks (VmData in /proc/PID/status);
mapped files and libraries don't count. Allocations beyond it fail. Children inherit the limit, each for itself.
"""

import os
import resource
import sys


def main() -> None:
    limit, command = int(sys.argv[1]), sys.argv[2:]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
