"""What is read of a trainer's output: all that is new, and at the very end a last line that lacks its own."""

import pytest

from actors.foreign.step_source import StepSource
from launcher.adapters.text_tail import MOST_BYTES
from tests.unit.launcher.adapters.test_command_adapter import adapter


@pytest.fixture
def log(tmp_path):
    return tmp_path / "trainer.log"


@pytest.fixture
def source(tmp_path, log):
    return StepSource(adapter(tmp_path), log)


def steps(seen):
    return [one.step for one in seen]


def test_a_long_log_is_read_to_its_end_at_once(source, log):
    log.write_text("step 1 reward 0.5\n" + "hello\n" * (MOST_BYTES // 3) + "step 2 reward 0.5\n")
    assert steps(source.read()) == [1, 2]
    assert steps(source.read()) == []


def test_a_last_line_without_an_end_counts_once_its_trainer_is_done(source, log):
    log.write_text("\rstep 1 reward 0.5\rstep 2 reward 0.5")
    assert steps(source.read()) == [1]
    assert steps(source.read(is_over=True)) == [2]
    assert steps(source.read(is_over=True)) == []
