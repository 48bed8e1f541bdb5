"""The command line of the benchmarks: which one, of which configuration, and where the raw points go."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path

from scripts.ending import DONE, ended
from scripts.faults.started_run import PRESET

BENCHMARKS = {
    "publish": "new weights to the server: from a folder, as tensors, over a group",
    "supervision": "steps with supervision against steps without, in one run",
    "failover": "from a server's SIGKILL to the next tokens of its completions: at another one, alone",
    "hangs": "from a server's SIGSTOP until it is condemned, and its requests are answered elsewhere",
    "trainer_kills": "a killed trainer to the next committed step, with a parked trainer and without",
    "state": "how long a step waits for its state in memory and a checkpoint: on its path and beside the next",
    "restores": "made runs with one cause each: which is named, and what going back costs",
    "scale": "monitor, Coordinator and pool with 10, 100 and 1,000 simulated servers, and 8 and 64 trainer ranks",
    "onsets": "how well onsets are found in made series: precision, recall, error",
}


def main() -> int:
    return ended(lambda: _run(parser(sys.argv[1:]).parse_args()))


def _run(given: argparse.Namespace) -> int:
    print(f"load average before: {load()}", file=sys.stderr)
    measured = given.run(given)
    print(*measured.lines(), sep="\n")
    print(f"load average after: {load()}", file=sys.stderr)
    if given.json is not None:
        given.json.write_text(json.dumps(dataclasses.asdict(measured), indent=1) + "\n")
    return DONE


def parser(words: list[str]) -> argparse.ArgumentParser:
    """Only the benchmark named in `words` is imported: some bring torch."""
    top = argparse.ArgumentParser(prog="python -m scripts.lab.benchmark", description="What this system costs, here.")
    names = top.add_subparsers(required=True, metavar="benchmark")
    for name, meaning in BENCHMARKS.items():
        one = names.add_parser(name, help=meaning, description=meaning)
        one.add_argument("--json", type=Path, help="write every raw point into this file")
        if name in words[:1]:
            benchmark = importlib.import_module(f"scripts.lab.benchmark.{name}")
            benchmark.add_arguments(one)
            one.set_defaults(run=benchmark.run)
        one.add_argument("overrides", nargs="*", help=f"settings, after {PRESET}")
    return top


def load() -> str:
    return " ".join(f"{average:.1f}" for average in os.getloadavg())


if __name__ == "__main__":
    sys.exit(main())
