"""The last write of a process that was killed: `python -m tests.programs.late_writer FILE DATA` writes DATA over the
beginning of FILE, and stops itself in its midst until it is continued. By then a successor may have written it.
"""

import os
import signal
import sys


def main() -> None:
    path, data = sys.argv[1], sys.argv[2].encode()
    half = len(data) // 2
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(file, data[:half], 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.pwrite(file, data[half:], half)


if __name__ == "__main__":
    main()
