"""A hosted tree whose actor is this process: `python -m tests.programs.hosted_elsewhere FOLDER FILE run|forked`.

Its log is in FOLDER. It prints `up` once its tree holds FILE open, one of those that begin as its name does up to its
last `_`, and the host has looked. After a line on its standard input it kills the server, and ends when nothing is
left of the tree.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from actors.processes.hosted_process import ProcessHost, ProcessLaunch
from tests.programs.forked_program import NAME, PLAIN
from tests.support.hosts import has_looked


async def main(folder: Path, file: Path, how: str) -> None:
    python = (sys.executable, "-S", "-m")
    head = (*python, NAME) if how == "forked" else python
    launch = ProcessLaunch(
        command=[*head, "tests.programs.fake_tree", str(file)],
        environment=dict(os.environ),
        log=folder / "log",
        mark=f"HOST_TEST={folder}",
        watch=[os.getpid()],
        grace_s=0.0,
        files=str(file).rpartition("_")[0],
    )
    host = await ProcessHost.begin(launch, head if how == "forked" else (*python, NAME, PLAIN))
    process = await host.start(launch)
    while not file.exists():
        await asyncio.sleep(0.01)
    await has_looked(launch.log)
    print("up", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    os.kill(process.pid, signal.SIGKILL)
    sys.exit(bool(await process.wait_swept()))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
