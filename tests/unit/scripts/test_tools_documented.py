"""Every flag of every tool that a page has a table of: in `--help`, in the table, in the same words."""

import argparse
import os
import subprocess
import sys

import pytest

from launcher.config.compose import REPOSITORY
from scripts.document_flags import DOCS, parser_of, table, tools_in, with_flags

PAGES = [page for page in sorted(DOCS.rglob("*.md")) if tools_in(page.read_text())]
TOOLS = [tool for page in PAGES for tool in tools_in(page.read_text())]
PROMISED = {
    "list_checkpoints": [
        "--experiment-name",
        "--trial-name",
        "--fileroot",
        "--user",
        "--max-step",
        "--before-step",
        "--latest",
        "--good",
        "--recover-info",
        "--verify",
        "--json",
    ],
    "setup_recovery": ["--before-step", "--checkpoint-path", "--good", "--undo", "--force"],
    "resume_training": ["--yes"],
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_is_what_the_parsers_say(page):
    assert with_flags(page.read_text()) == page.read_text(), "python -m scripts.document_flags writes it"


@pytest.mark.parametrize("tool", sorted({*TOOLS, *PROMISED}))
def test_help_names_each_flag_and_the_exit_codes(tool):
    assert tool in TOOLS
    parser = parser_of(tool)
    said = " ".join(parser.format_help().split())
    for action in parser._actions:
        assert action.help
        assert action.help is not argparse.SUPPRESS
        assert all(flag in said for flag in action.option_strings)
    assert "Exit codes: 0" in said or "Exit codes: those of the run" in said


@pytest.mark.parametrize("tool", PROMISED)
def test_what_was_promised_is_there(tool):
    shown = table(parser_of(tool))
    assert all(f"`{flag}" in shown for flag in PROMISED[tool])


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["check_health", "check_ledger", "diagnose", "list_checkpoints", "report"])
def test_a_tool_can_be_started_by_its_path_and_loads_no_torch(tool):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", f"scripts/{tool}.py", "--help"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Exit codes: 0 " in done.stdout, done.stderr
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not {"torch", "sglang", "transformers", "wandb"} & loaded
    assert "ray" not in loaded or tool == "check_health"
    assert "launcher" in loaded


def test_a_table_that_fell_behind_is_noticed():
    page = "<!-- flags: list_checkpoints -->\n| `--old` | gone |\n<!-- end of flags -->\n"
    assert with_flags(page) != page
    assert "--verify" in with_flags(page)
    assert "--old" not in with_flags(page)
