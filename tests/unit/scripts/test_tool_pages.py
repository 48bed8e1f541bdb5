"""The pages for people name commands, flags and settings that exist, and all flags of the tools they describe."""

import argparse
import importlib
import importlib.util
import re
import shlex

import pytest

from launcher.config.compose import REPOSITORY, compose
from launcher.config.schema import RunConfig
from launcher.config.settings import settings_of

PAGES = [REPOSITORY / "docs" / f"{name}.md" for name in ("watch", "troubleshooting")]
TOOLS = {
    "check_health",
    "check_ledger",
    "diagnose",
    "inject_fault",
    "list_checkpoints",
    "report",
    "resume_training",
    "run_control",
    "setup_recovery",
    "watch",
}
KEYS = {setting.key for setting in settings_of(RunConfig)}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
NOT_SETTINGS = {"memory.ran_out", "memory.rising", "restart.*", "trainer.log", "trainer.restored"}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}


def commands_on(page):
    """The commands in a page's blocks of code and in its lines."""
    text = page.read_text()
    quoted = re.findall(r"`(python -m [^`]+)`", text)
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    typed = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return quoted + [line for line in typed if line.startswith("python -m ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_command_on_a_page_is_one_that_exists(page):
    for command in commands_on(page):
        module, *words = shlex.split(command.removeprefix("python -m ").replace("…", ""))
        package, _, name = module.partition(".")
        if package == "scripts":
            assert name in TOOLS, command
            check_flags(command, module, words)
        if package == "launcher" or name == "resume_training":
            settings = [word.partition("=")[0] for word in words if "=" in word and not word.startswith("-")]
            assert set(settings) - {"conf"} <= KEYS, command


def check_flags(command, module, words):
    if importlib.util.find_spec(module) is None:
        return
    tool = importlib.import_module(module)
    parser = getattr(tool, "parser", None) or tool._parser
    assert {word for word in words if word.startswith("--")} <= flags_of(parser()), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_setting_on_a_page_is_one_that_exists(page):
    named = re.findall(r"`([a-z_]+(?:\.[a-z_0-9*]+)+)(?:=[^`]*)?`", page.read_text())
    settings = {name for name in named if name.partition(".")[0] in SECTIONS} - NOT_SETTINGS
    assert settings <= KEYS


@pytest.mark.slow
def test_each_value_that_is_proposed_is_accepted():
    """Each by itself, beside a preset: of the right type, in its range, in no contradiction to the others."""
    text = "".join(page.read_text() for page in PAGES)
    proposed = set(re.findall(r"`([a-z_]+\.[a-z_.0-9]+=[^`\s…]+)`", text))
    assert len(proposed) > 20
    for word in sorted(proposed):
        compose(["conf=arithmetic_cpu", word])
