"""A command under a memory limit of its own: `python -S -m actors.processes.memory_limit BYTES command …`.

RLIMIT_DATA, which the kernel keeps for each process: what it has for itself and may write to, heap and thread stacks
(VmData in /proc/PID/status); mapped files and libraries don't count. What is beyond it fails as an allocation, in the
words of whoever asked for it. Children inherit the limit, each for itself.
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
