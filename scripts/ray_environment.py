"""The environment for `ray start` on each node of a cluster, and for the commands that use it: as `export` lines.

`eval "$(python -m scripts.ray_environment /shared/folder)"` before each of them. The cluster's token is made in that
folder where it isn't there, for this user alone; it is never printed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from actors.cluster.ray_cluster import RAY_ENVIRONMENT
from launcher.run_files.run_keys import make_ray_token
from scripts.checkpoints.arguments import Parser
from scripts.ending import DONE, ended


def main(arguments: list[str] | None = None) -> int:
    return ended(lambda: _print(parser().parse_args(arguments).folder))


def _print(folder: Path) -> int:
    token = make_ray_token(folder.expanduser().absolute())
    named = {**RAY_ENVIRONMENT, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    for name, value in named.items():
        print(f"export {name}={shlex.quote(value)}")
    return DONE


def parser() -> argparse.ArgumentParser:
    what = "Print the environment for `ray start` on each node of a cluster, and for what uses it."
    made = Parser("ray_environment", what, "0 printed; 2 the folder can't be used.")
    made.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="path of the cluster's token, visible from every node; made if missing",
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
