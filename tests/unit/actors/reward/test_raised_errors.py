"""The place that an error names is the deepest line of the user's own files."""

import pytest

from actors.reward import raised_errors
from actors.reward.raised_errors import MOST_TRACEBACKS, log_traceback, place_of
from actors.reward.reward_functions import MAX_ERROR_CHARS, RewardFunctions
from actors.reward.reward_import import import_named
from launcher.base.errors import RewardImportError

HELPERS = """
import json

def read(text):
    return json.loads(text)
"""
REWARDS = """
import placed_helpers

def score(completion):
    if completion == "long":
        raise ValueError("x" * 9999)
    return placed_helpers.read(completion)
"""
ITEM = {"answer": "", "prompt_id": "p", "record": {}, "token_ids": [], "finish_reason": "stop", "group": []}


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "placed_helpers.py").write_text(HELPERS)
    (tmp_path / "placed_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return RewardFunctions("placed_rewards:score", [], 30.0)


def error_of(functions, completion):
    (message,) = functions.score([{**ITEM, "completion": completion}])
    return message["error"]


def test_a_library_is_not_the_place_and_a_helper_is(functions):
    assert error_of(functions, "{").endswith("(placed_helpers.py:5)")


def test_the_place_stays_where_the_message_is_cut(functions):
    said = error_of(functions, "long")
    assert len(said) == MAX_ERROR_CHARS
    assert said.endswith("x (placed_rewards.py:6)")


def test_an_error_without_frames_has_no_place():
    assert place_of(ValueError("never raised")) == ""


def test_a_file_that_can_not_be_compiled_is_named_by_the_error_alone(tmp_path, monkeypatch):
    (tmp_path / "torn_rewards.py").write_text("def score(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardImportError) as failed:
        import_named("torn_rewards:score", "reward.fn")
    assert failed.value.message.endswith("(torn_rewards.py, line 1)")


def test_the_tracebacks_of_a_process_are_limited(monkeypatch, capsys):
    log_traceback(ValueError("before it is asked for"), "before")
    monkeypatch.setattr(raised_errors, "_written", set())
    for number in [*range(MOST_TRACEBACKS + 5), 0]:
        log_traceback(ValueError(number), f"ValueError: {number}")
    assert capsys.readouterr().err.count("ValueError: ") == MOST_TRACEBACKS
