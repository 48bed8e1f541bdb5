"""An example: the reward of code is whether it passes the record's tests, run in a process with limits.

    PYTHONPATH=assets/examples python -m launcher … reward.fn=code_reward:passes_tests

The record's answer holds the tests, as Python. The last ``` block of the completion and the tests run in an
interpreter of their own: five seconds of processor time, 512 MiB, no new processes (where the user is not root), no
file above 1 MiB, an empty folder, no environment. This keeps a loop, a flood of memory or of files from the run. It is
no prison: the code still reads what this user may read, and has the network. Against code that attacks, run this
function's module in a container or a virtual machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile

CPU_S = 5
WALL_S = 10
MEMORY_BYTES = 512 * 2**20
FILE_BYTES = 2**20
MOST_PROCESSES = 0
"""Beyond those there are: a limit of the kernel's that does not hold for root."""

BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


def passes_tests(completion: str, answer: str) -> float:
    """1 where the code runs the tests to their end, else 0."""
    blocks = BLOCK.findall(completion)
    if not blocks:
        return 0.0
    done = f"passed {secrets.token_hex(8)}"  # `os._exit(0)` before the tests is no pass
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        program = f"{blocks[-1]}\n{answer}\n"
        runner = f"import sys; exec(compile(sys.stdin.read(), 'answer', 'exec'), {{}}); print({done!r})"
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", runner],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
            preexec_fn=_limit,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it did not pass
                process.communicate(program.encode(), timeout=WALL_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing that it started is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return float(output.read().decode(errors="replace").strip().endswith(done))


def _limit() -> None:
    for limit, value in (
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NPROC, MOST_PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
