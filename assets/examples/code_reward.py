"""An example: the reward of code is whether it passes the record's tests, run in a process with limits.

    PYTHONPATH=assets/examples python -m launcher … reward.fn=code_reward:passes_tests

The record's answer holds the tests, as Python. The last ``` block of the completion and the tests run in an
interpreter of their own: five seconds of processor time, 512 MiB, no new processes (where the user is not root), no
file above 1 MiB, an empty folder, no environment. This keeps a loop, a flood of memory or of files from the run.

Where bubblewrap is installed (`apt-get install bubblewrap`) the code also has no network, sees no other process, and of
the files only the system's and Python's, which it can't write. Without it, it may read what this user may read, and has
the network: trainer.log says so. A hole in the kernel stays one: against code that attacks, use a virtual machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

CPU_S = 5
WALL_S = 10
MEMORY_BYTES = 512 * 2**20
FILE_BYTES = 2**20
MOST_PROCESSES = 0
"""Beyond those there are: a limit of the kernel's that does not hold for root."""

PREFIX = Path(sys.prefix).resolve()
PYTHON = str(PREFIX / "bin" / Path(sys.executable).name)
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix, str(PREFIX))

log = logging.getLogger("code_reward")
LIMITS = "; ".join(
    ["import resource as r"]
    + [
        f"r.setrlimit(r.RLIMIT_{name}, ({value}, {value}))"
        for name, value in (
            ("CPU", CPU_S),
            ("AS", MEMORY_BYTES),
            ("FSIZE", FILE_BYTES),
            ("NPROC", MOST_PROCESSES),
            ("CORE", 0),
        )
    ]
)
"""Set by the interpreter itself, before it reads the code: bubblewrap starts processes too."""
BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


def passes_tests(completion: str, answer: str) -> float:
    """1 where the code runs the tests to their end, else 0."""
    blocks = BLOCK.findall(completion)
    if not blocks:
        return 0.0
    done = f"passed {secrets.token_hex(8)}"  # `os._exit(0)` before the tests is no pass
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        program = f"{blocks[-1]}\n{answer}\n"
        runner = f"{LIMITS}; import sys; exec(compile(sys.stdin.read(), 'answer', 'exec'), {{}}); print({done!r})"
        process = subprocess.Popen(
            [*SANDBOX, PYTHON, "-I", "-c", runner],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
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


def _sandbox() -> list[str]:
    """The words before a command that has nothing but the system's files; none without bubblewrap. Raises RuntimeError
    where it is there and does not work: each answer would be wrong.
    """
    if (program := shutil.which("bwrap")) is None:
        log.warning("no bubblewrap: code may read this user's files, and has the network")
        return []
    words = [program, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    for folder in SYSTEM:
        words += ["--ro-bind-try", folder, folder]
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"]
    tried = subprocess.run([*words, PYTHON, "-I", "-c", ""], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise RuntimeError(f"bubblewrap does not work here: {tried.stderr.strip()}; containers need user namespaces")
    return words


SANDBOX = _sandbox()
