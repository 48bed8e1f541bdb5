"""The command line: which figure, of which configuration, and where the raw points go.

Each figure's module is imported when it is asked for: some bring torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from launcher.config.compose import compose
from launcher.config.schema import RunConfig
from scripts.benchmark.experiment import PRESET, run_experiment

THREADS = tuple(f"sglang.threads={server} actor.threads={trainer}" for server in (1, 2) for trainer in (2, 1))

Measure = Callable[[argparse.Namespace], dict[str, object]]


def main() -> None:
    arguments = parser().parse_args()
    print(f"load average before: {load()}", file=sys.stderr)
    result = arguments.measure(arguments)
    print(f"load average after: {load()}", file=sys.stderr)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m scripts.benchmark", description="What this system costs, here.")
    figures = top.add_subparsers(required=True, metavar="figure")

    def add(name: str, measure: Measure, meaning: str) -> argparse.ArgumentParser:
        one = figures.add_parser(name, help=meaning, description=meaning)
        one.add_argument("--json", type=Path, help="write every raw point into this file")
        one.add_argument("overrides", nargs="*", help=f"settings, after {PRESET}")
        one.set_defaults(measure=measure)
        return one

    rollout = add("rollout", measure_rollout, "tokens/s of our rollouts against plain clients of the same server")
    rollout.add_argument("--rounds", type=int, default=12, help="blocks of each contestant")
    rollout.add_argument("--batches", type=int, default=3, help="batches of a block")
    routing = add("routing", measure_routing, "tokens/s of two servers behind our pool against the two driven directly")
    routing.add_argument("--rounds", type=int, default=12, help="blocks of each contestant")
    routing.add_argument("--batches", type=int, default=3, help="batches of a block")
    routing.add_argument("--stand-in", action="store_true", help="servers that make tokens at a set pace; one joins")
    step = add("step", measure_step, "share of a step that is neither generation nor training")
    step.add_argument("--logs", type=Path, help="the logs folder of a run that was; else one is made")
    step.add_argument("--steps", type=int, default=60, help="of the run that is made")
    settings = add("settings", measure_settings, "settings against each other, by the seconds of a step")
    settings.add_argument("--variant", action="append", help="a line of settings; the first is what the others go by")
    settings.add_argument("--rounds", type=int, default=3, help="runs of each variant")
    settings.add_argument("--steps", type=int, default=15, help="steps of each run")
    publish = add("publish", measure_publish, "new weights to the server: from a folder and over the wire")
    publish.add_argument("--publishes", type=int, default=60, help="of each way")
    supervision = add("supervision", measure_supervision, "steps with supervision against steps without, in one run")
    supervision.add_argument("--pairs", type=int, default=34, help="of blocks, one with and one without")
    supervision.add_argument("--block", type=int, default=6, help="steps of a block, of which the first doesn't count")
    supervision.add_argument("--seed", type=int, default=0, help="of the order within the pairs")
    state = add("state", measure_state, "the state after a step into memory, by its size")
    state.add_argument("--megabytes", type=int, nargs="+", default=[5, 50, 500], help="sizes of a state")
    state.add_argument("--times", type=int, default=20, help="writes of each size")
    start = add("start", measure_start, "from the command to the first optimizer step")
    start.add_argument("--times", type=int, default=5, help="commands")
    logs = add("logs", measure_logs, "how fast scripts/diagnose.py reads a log, and in how much memory")
    logs.add_argument("--gigabytes", type=float, default=1.0, help="of the log that is made")
    logs.add_argument("--log", choices=("trainer", "server"), default="trainer", help="whose log")
    logs.add_argument("--folder", type=Path, help="where it is made, and removed afterwards; else a temporary one")
    onsets = add("onsets", measure_onsets, "how well onsets are found in made series: precision, recall, error")
    onsets.add_argument("--each", type=int, default=60, help="series of each kind")
    onsets.add_argument("--seed", type=int, default=0, help="of the series")
    return top


def measure_rollout(arguments: argparse.Namespace) -> dict[str, object]:
    from scripts.benchmark.rollout import measure, report

    return report(measure(configuration(arguments), rounds=arguments.rounds, batches=arguments.batches))


def measure_routing(arguments: argparse.Namespace) -> dict[str, object]:
    from scripts.benchmark.routing import measure, report

    config, sizes = configuration(arguments), {"rounds": arguments.rounds, "batches": arguments.batches}
    return report(measure(config, **sizes, stand_in=arguments.stand_in))


def measure_step(arguments: argparse.Namespace) -> dict[str, object]:
    from scripts.benchmark.step import paths_in, read_step_times, report

    if arguments.logs is not None:
        return report(read_step_times(paths_in(arguments.logs)))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        run = run_experiment(Path(folder), [f"total_train_steps={arguments.steps}", *arguments.overrides])
        return report(read_step_times(run.paths))


def measure_settings(arguments: argparse.Namespace) -> dict[str, object]:
    from scripts.benchmark.settings import measure, report

    variants = [" ".join([line, *arguments.overrides]) for line in arguments.variant or THREADS]
    return report(measure(variants, rounds=arguments.rounds, steps=arguments.steps))


def measure_publish(arguments: argparse.Namespace) -> dict[str, object]:
    from scripts.benchmark.publish import measure, report

    return report(measure(configuration(arguments), publishes=arguments.publishes))


def measure_supervision(arguments: argparse.Namespace) -> dict[str, object]:
    from scripts.benchmark.supervision import WARM_UP, measure, report
    from scripts.benchmark.switched_run import SwitchSchedule

    schedule = SwitchSchedule(first=WARM_UP, block=arguments.block, pairs=arguments.pairs, seed=arguments.seed)
    return report(measure(arguments.overrides, schedule))


def measure_state(arguments: argparse.Namespace) -> dict[str, object]:
    from scripts.benchmark.state import measure, report

    return report(measure(arguments.megabytes, arguments.times))


def measure_start(arguments: argparse.Namespace) -> dict[str, object]:
    from scripts.benchmark.start import measure, report

    return report(measure(arguments.overrides, times=arguments.times))


def measure_logs(arguments: argparse.Namespace) -> dict[str, object]:
    from scripts.benchmark.diagnose import measure, report

    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=arguments.folder) as folder:
        return report([measure(arguments.gigabytes, Path(folder), arguments.log)])


def measure_onsets(arguments: argparse.Namespace) -> dict[str, object]:
    from scripts.benchmark.onsets import run

    return run(arguments.each, arguments.seed)


def configuration(arguments: argparse.Namespace) -> RunConfig:
    return compose([PRESET, *arguments.overrides])


def load() -> str:
    return " ".join(f"{average:.1f}" for average in os.getloadavg())


if __name__ == "__main__":
    main()
