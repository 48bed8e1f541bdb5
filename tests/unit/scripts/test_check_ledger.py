"""The command that checks a ledger: what it prints, and its exit code."""

import shutil

import pytest

from scripts.check_ledger import main
from tests.support.made_ledger import MadeRun

COUNTS = "160 prompts, each exactly twice; 20 of 20 steps\n"


@pytest.fixture
def run(tmp_path):
    run = MadeRun(tmp_path, faults=1, total_steps=20)
    run.take_steps(20)
    run.finish()
    return run


def test_a_sound_ledger(run, capsys):
    assert main([str(run.paths.logs)]) == 0
    assert capsys.readouterr().out == COUNTS + "no problem was found\n"


def test_a_ledger_that_has_lost_a_step(run, capsys):
    run.change(run.paths.ledger, lambda lines: [line for line in lines if line["global_step"] != 15])
    assert main([str(run.paths.logs)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "steps never committed: [15]" in said
    assert "no problem was found" not in said


def test_where_part_of_it_is_not_known(run, capsys):
    """It ended with 1, as where a step is lost."""
    shutil.rmtree(run.paths.default_checkpoints)
    assert main([str(run.paths.logs)]) == 3
    said = capsys.readouterr().out
    assert said.startswith(f"{COUNTS}not known: whether steps or prompts are ")


def test_what_is_lost_comes_before_what_is_not_known(run, capsys):
    shutil.rmtree(run.paths.default_checkpoints)
    run.change(run.paths.ledger, lambda lines: [line for line in lines if line["global_step"] != 15])
    assert main([str(run.paths.logs)]) == 1
    assert "not known: " in capsys.readouterr().out
