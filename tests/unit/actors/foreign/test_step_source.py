"""What is read of a trainer's output: all that is new, and at the very end a last line that lacks its own."""

import pytest

from actors.foreign.step_source import MOST_BYTES, StepSource
from tests.support.worlds.adapters import adapter


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


@pytest.mark.parametrize("first", ["step 1 reward 0.5\nstep 2 reward 0.5\nstep 3 reward 0.5\n", ""])
def test_steps_that_it_writes_again_as_it_resumes_are_not_taken_again(source, log, first):
    log.write_text("".join(f"step {step} reward 0.5\n" for step in range(1, 9)) + "step 9 rew")
    assert steps(source.read()) == list(range(1, 9))
    source.begin(after=3)
    log.write_text(f"{first}step 4 reward 0.5\nstep 5 rew")
    assert steps(source.read()) == [4]
    with log.open("a") as file:
        file.write("ard 0.5\n")
    assert steps(source.read()) == [5]


def test_one_that_begins_its_file_and_its_steps_anew_is_seen_to(source, log):
    log.write_text("".join(f"step {step} reward 0.5\n" for step in range(1, 9)))
    source.begin(after=5)
    log.write_text("step 1 reward 0.5\n")
    assert steps(source.read()) == [1]


def test_what_was_torn_before_a_file_was_begun_again_joins_nothing(source, log):
    log.write_bytes(b"hello, step 99 " + "…".encode()[:2])
    assert steps(source.read()) == []
    log.write_text("reward 1\nstep 1 reward 0.5\n"[:12])
    assert steps(source.read()) == []
    log.write_text("reward 1\nstep 1 reward 0.5\n")
    assert steps(source.read()) == [1]
