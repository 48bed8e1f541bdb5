"""A guarded tree whose owner is this process: `python -m tests.programs.guarded_elsewhere FOLDER FILE`.

Its log is in FOLDER. It prints `up` once its tree holds FILE open, one of those that begin as its name does up to its
last `_`, and the sentinel has looked. After a line on its standard input it kills the server, and ends when nothing is
left of the tree.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from actors.processes.guarded_process import GuardedProcess, ProcessLaunch
from tests.support.guards import has_looked


async def main(folder: Path, file: Path) -> None:
    process = await GuardedProcess.launch(
        ProcessLaunch(
            command=[sys.executable, "-S", "-m", "tests.programs.fake_tree", str(file)],
            environment=dict(os.environ),
            log=folder / "log",
            mark=f"GUARD_TEST={folder}",
            watch=[os.getpid()],
            grace_s=0.0,
            files=str(file).rpartition("_")[0],
        )
    )
    while not file.exists():
        await asyncio.sleep(0.01)
    await has_looked(process.sentinel_pid)
    print("up", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    os.kill(process.pid, signal.SIGKILL)
    sys.exit(bool(await process.wait_swept()))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
