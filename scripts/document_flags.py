"""Writes the tables of flags in docs/*.md from the tools' own parsers: `python -m scripts.document_flags`.

Between `<!-- flags: <tool> -->` and `<!-- end of flags -->`, from `scripts.<tool>.parser()`. A test holds the pages
equal to what this writes, so that `--help` and the docs can't differ.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

from scripts.checkpoints.arguments import Parser
from scripts.ending import DONE, ended

DOCS = Path(__file__).resolve().parent.parent / "docs"
NAMES_OF_A_RUN = ("experiment_name", "trial_name", "fileroot", "user")
HOW_TO_NAME = "[the run](watch.md#how-a-run-is-named)"
_TABLE = re.compile(r"(<!-- flags: (\w+) -->\n).*?(<!-- end of flags -->)", re.DOTALL)


def main() -> int:
    return ended(_write)


def _write() -> int:
    Parser("document_flags", "Write the tables of flags in docs/*.md from the tools' own parsers.").parse_args()
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        if (written := with_flags(text)) != text:
            page.write_text(written)
    return DONE


def with_flags(page: str) -> str:
    """The page with each of its tables as the parsers have them now."""
    return _TABLE.sub(lambda found: f"{found[1]}{table(parser_of(found[2]))}{found[3]}", page)


def tools_in(page: str) -> list[str]:
    return [found[2] for found in _TABLE.finditer(page)]


def parser_of(tool: str) -> argparse.ArgumentParser:
    made = importlib.import_module(f"scripts.{tool}").parser()
    assert isinstance(made, argparse.ArgumentParser)
    return made


def table(parser: argparse.ArgumentParser) -> str:
    """One row for each flag, and one for all that name a run; `--help`, which every tool has, is left out."""
    shown = [action for action in parser._actions if "--help" not in action.option_strings]  # noqa: SLF001
    naming = [action for action in shown if action.dest in NAMES_OF_A_RUN]
    if len(naming) < len(NAMES_OF_A_RUN):  # a tool with fewer of them says what its own mean
        naming = []
    rows = [_row(action) for action in shown if action not in naming]
    if naming:
        rows.insert(shown.index(naming[0]), f"| {', '.join(map(_flag, naming))} | {HOW_TO_NAME} |")
    return "\n".join(["| flag | what it does |", "|---|---|", *rows, ""])


def _row(action: argparse.Action) -> str:
    words = (action.help or "").replace(" (default: %(default)s)", _default(action)).replace("|", "\\|")
    return f"| {_flag(action)} | {words} |"


def _flag(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    value = f" {action.metavar or action.dest.upper()}" if action.option_strings and action.nargs != 0 else ""
    return f"`{name}{value}`"


def _default(action: argparse.Action) -> str:
    """Of the reader's own, which differ from page to page, only that there is one."""
    return "; by default the login name" if action.dest == "user" else f"; by default `{action.default}`"


if __name__ == "__main__":
    sys.exit(main())
