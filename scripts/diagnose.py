"""What happened to a run, since which step, why, and how to resume: `python -m scripts.diagnose --help`.

Reads logs of this launcher and of AReaL, WandB's CSV exports and offline files; see docs/troubleshooting.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from launcher.base.errors import UsageError
from launcher.diagnosis.judging.verdict import Diagnosis, RunCondition, diagnose
from launcher.diagnosis.output.as_json import to_dict
from launcher.diagnosis.output.as_text import render
from launcher.diagnosis.reading.inputs import find_inputs, read_inputs
from launcher.diagnosis.reading.run_folders import look_around
from launcher.reporting.terminal_text import SafeConsole, as_far_as_it_is_read, console_of_width
from scripts.checkpoints.arguments import Parser, add_names
from scripts.ending import ended, print_json
from scripts.run_choice import named_run

NO_FAILURE, FAILURE, UNCLEAR = 0, 1, 3
PROGRESS_FROM_BYTES = 64 * 2**20
WIDTH_OF_A_FILE = 160

EXIT_CODES = (
    "0 no failure found; 1 a failure was found; 2 the command or a file is wrong; 3 unclear, too little was seen; "
    "130 interrupted."
)
EXAMPLES = """

  python -m scripts.diagnose --experiment-name gsm8k --trial-name trial0
  python -m scripts.diagnose /data/logs/me/gsm8k/trial0
  python -m scripts.diagnose trainer.log llm_server.log
  python -m scripts.diagnose wandb_export.csv --json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _diagnose(parser().parse_args(arguments)))


def _diagnose(given: argparse.Namespace) -> int:
    diagnosis = run(given)
    with as_far_as_it_is_read():
        show(diagnosis, given)
    if diagnosis.condition is RunCondition.UNCLEAR:
        return UNCLEAR
    return FAILURE if diagnosis.is_failure else NO_FAILURE


def parser() -> argparse.ArgumentParser:
    """The command line; docs/troubleshooting.md names each of its flags."""
    what = (
        "Finds what happened to a run: since which step, why, and how to resume.\n"
        "Logs of this launcher, of AReaL, and what WandB exports."
    )
    made = Parser("diagnose", what, EXIT_CODES, examples=EXAMPLES)
    made.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="a run's log folder, or files (trainer.log, llm_server.log, merged.log, metrics.jsonl, *.csv, *.wandb), "
        "in any number: what they tell is put together by their dates (default: the only run, or the only live one)",
    )
    add_names(made.add_argument_group("instead of PATH"), trial_help="trial_name of the run")
    made.add_argument(
        "--checkpoints", type=Path, metavar="DIR", help="folder of its checkpoints, if not beside the logs"
    )
    made.add_argument(
        "--metric",
        default="",
        metavar="KEY",
        help="the key that holds the reward; else …/task_reward/avg, …/final_reward/avg or rollout/reward, the first "
        "there is",
    )
    made.add_argument("--json", action="store_true", help="for programs, on standard output: grpo-diagnosis/1")
    made.add_argument(
        "--no-progress",
        action="store_true",
        help="don't show the progress of reading; none is shown without a terminal, or for less than 64 MiB",
    )
    return made


def run(given: argparse.Namespace) -> Diagnosis:
    """The diagnosis of what is named. Raises UsageError."""
    if given.paths and (given.experiment_name or given.trial_name):
        raise UsageError("PATH and --experiment-name exclude each other", "give one of them")
    paths = list(given.paths) or [named_run(given).logs]
    if given.checkpoints is not None and not given.checkpoints.is_dir():
        raise UsageError(
            f"--checkpoints {given.checkpoints} is no folder", "name the folder that holds epoch…globalstep…"
        )
    inputs = find_inputs(paths)
    with _progress(sum(one.bytes for one in inputs), is_wanted=not given.no_progress) as on_progress:
        contents = read_inputs(inputs, metric=given.metric, on_progress=on_progress)
    return diagnose(contents, look_around(paths, contents.log_events, given.checkpoints))


@contextmanager
def _progress(total: int, *, is_wanted: bool) -> Iterator[Callable[[int], None]]:
    """Shown on standard error, at a terminal, where there is enough to wait for."""
    if not is_wanted or total < PROGRESS_FROM_BYTES or not sys.stderr.isatty():
        yield lambda done: None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=SafeConsole(sys.stderr), transient=True) as shown:
        task = shown.add_task("", total=total)
        yield lambda done: shown.update(task, completed=done)


def show(diagnosis: Diagnosis, given: argparse.Namespace) -> None:
    if given.json:
        print_json(to_dict(diagnosis), indent=1)
        return
    console = console_of_width(WIDTH_OF_A_FILE)
    with console.capture() as captured:
        console.print(render(diagnosis), crop=False)
    console.file.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
