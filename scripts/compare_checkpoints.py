"""What changed between two checkpoints, and did it break the model? `python -m scripts.compare_checkpoints --help`.

Each tensor's norms, the distance, and the direction of the update, read in some tens of megabytes of memory; with
--answers the real SGLang answers held-out prompts with each. Ours and other programs' Hugging Face exports. Nothing is
changed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from launcher.base.errors import UsageError
from launcher.reporting.terminal_text import SafeConsole, console_of_width
from scripts.checkpoints.answers import Answers, ask
from scripts.checkpoints.arguments import NOTHING_FITS, Parser
from scripts.checkpoints.comparison import Comparison, compare, sentence
from scripts.ending import DONE, ended, print_json

WIDTH, MOST = 160, 15
FIGURES = ("a_norm", "b_norm", "distance", "cosine", "update_cosine", "earlier_cosine")
EXIT_CODES = (
    "0 nothing was seen that speaks against B; 1 something was, or could not be looked at; 2 the command is wrong, or "
    "one of them is no model"
)
EXAMPLES = """

  python -m scripts.compare_checkpoints …/epoch2epochstep7globalstep187 …/epoch2epochstep9globalstep189
  python -m scripts.compare_checkpoints A B --answers 16 conf=gsm8k_h200
"""


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _compare(parser().parse_intermixed_args(arguments)))


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "compare_checkpoints",
        "Compare the weights of two checkpoints: did training change B, or did something break it?",
        EXIT_CODES,
        examples=EXAMPLES,
    )
    made.add_argument("a", type=Path, metavar="A", help="folder of the earlier checkpoint, believed to be sound")
    made.add_argument("b", type=Path, metavar="B", help="folder of the later one, which is in question")
    made.add_argument(
        "--base", type=Path, metavar="FOLDER", help="one before A: does the update go on in the same direction?"
    )
    made.add_argument("--answers", type=int, default=0, metavar="K", help="let both answer K held-out prompts greedily")
    made.add_argument("--all", action="store_true", help=f"list all tensors, not only the {MOST} most distant")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the run, for --answers: conf=… and others")
    return made


def _compare(given: argparse.Namespace) -> int:
    if given.answers < 0 or bool(given.answers) != bool(given.settings):
        raise UsageError(
            "--answers K and the run's settings belong together, K from 1",
            "e.g. --answers 16 conf=gsm8k_h200: data set, chat template, reward function and server are of these",
        )
    if wrong := [one for one in given.settings if "=" not in one]:
        raise UsageError(f"{wrong[0]!r} is no setting", "write key=value")
    found = compare(given.a, given.b, given.base)
    answers = ask(given.settings, (given.a, given.b), given.answers) if given.answers else None
    if given.json:
        print_json(_facts(found, answers))
    else:
        _show(found, answers, most=None if given.all else MOST)
    return NOTHING_FITS if found.against or (answers is not None and answers.against) else DONE


def _facts(found: Comparison, answers: Answers | None) -> dict[str, object]:
    return {
        "format": "grpo-comparison/1",
        "a": str(found.a),
        "b": str(found.b),
        "verdict": sentence(found),
        "against": [*found.against, *(answers.against if answers else ())],
        "unlooked": list(found.unlooked),
        "tensors": [
            {"name": one.name, "shape": list(one.shape)} | {figure: getattr(one, figure) for figure in FIGURES}
            for one in found.tensors
        ],
        "answers": None if answers is None else answers.facts(),
    }


def _show(found: Comparison, answers: Answers | None, *, most: int | None) -> None:
    console = SafeConsole(soft_wrap=True)
    console.print(f"A  {found.a}\nB  {found.b}")
    against = [*found.against, *(answers.against if answers else ())]
    console.print(sentence(found), style="bold red" if found.against else "bold")
    for line in [*against, *(f"not looked at: {what}" for what in found.unlooked)]:
        console.print(f"  {line}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("tensor", "norm in A", "norm in B", "distance", "cosine", "update and A"):
        table.add_column(name, justify="left" if name == "tensor" else "right", no_wrap=True)
    if found.has_base:
        table.add_column("update and the one before", justify="right", no_wrap=True)
    shown = sorted(found.tensors, key=lambda one: (not math.isnan(one.distance), -one.distance))[:most]
    for one in (found.total, *shown):
        figures = [f"{one.a_norm:.5g}", f"{one.b_norm:.5g}", f"{one.distance:.3g}", f"{one.cosine:.6f}"]
        cosines = [one.update_cosine, *([one.earlier_cosine] if found.has_base else [])]
        table.add_row(one.name, *figures, *("–" if math.isnan(value) else f"{value:+.3f}" for value in cosines))
    console.print()
    console_of_width(WIDTH).print(table)
    if len(shown) < len(found.tensors):
        console.print(f"{len(found.tensors) - len(shown)} tensors more, which are closer: --all")
    if answers is not None:
        console.print(f"\n{answers.sentence()}")
        for line in answers.lines():
            console.print(f"  {line}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
