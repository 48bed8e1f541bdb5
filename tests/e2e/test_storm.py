"""A whole run with the real SGLang under a small storm; `python -m scripts.storm` makes the large ones."""

import json

import pytest

from scripts.storm import main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ONE_OF_EACH = "C1 C2 C5 T1 M1 T3"
WITHOUT_DELAY = ["recover.freq_steps=4", "evaluator.freq_steps=null"]
STEPS, BATCH, PROMPTS = 30, 8, 64
SHORT = [f"total_train_steps={STEPS}", f"train_dataset.batch_size={BATCH}", f"train_dataset.max_items={PROMPTS}"]
"""Three epochs and three quarters, with four steps for each fault and those that take it back."""


def test_one_of_each_fault_and_nothing_is_lost(tmp_path):
    result = tmp_path / "result.json"
    asked = ["--faults", ONE_OF_EACH, "--seed", "5", "--fileroot", str(tmp_path / "run"), "--json", str(result)]
    exit_code = main([*asked, *WITHOUT_DELAY, *SHORT])
    console = (tmp_path / "run" / "console.log").read_text()
    assert exit_code == 0, console
    found = json.loads(result.read_text())
    assert sorted(outcome["kind"] for outcome in found["outcomes"]) == sorted(ONE_OF_EACH.split())
    unnoticed = {outcome["kind"] for outcome in found["outcomes"] if outcome["noticed_s"] is None}
    assert unnoticed <= {"C5"}, "old weights may be replaced before anybody compares log-probs"
    assert (found["audit"]["steps"], found["audit"]["total_steps"]) == (STEPS, STEPS)
    assert found["audit"]["times"] == [[3, PROMPTS // 4], [4, PROMPTS - PROMPTS // 4]], (
        "three epochs and three quarters"
    )
    assert found["audit"]["largest_distance"] < 1e-5, "no batch came from other weights than the trainer's"
