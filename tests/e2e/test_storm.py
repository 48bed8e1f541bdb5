"""A whole run with the real SGLang under a small storm; `python -m scripts.storm` makes the large ones."""

import json

import pytest

from scripts.storm import main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ONE_OF_EACH = "C1 C2 C5 T1 M1 T3"
WITHOUT_DELAY = ["total_train_steps=45", "recover.freq_steps=4", "evaluator.freq_steps=null"]


def test_one_of_each_fault_and_nothing_is_lost(tmp_path):
    result = tmp_path / "result.json"
    asked = ["--faults", ONE_OF_EACH, "--seed", "5", "--fileroot", str(tmp_path / "run"), "--json", str(result)]
    exit_code = main([*asked, *WITHOUT_DELAY])
    console = (tmp_path / "run" / "console.log").read_text()
    assert exit_code == 0, console
    found = json.loads(result.read_text())
    assert sorted(outcome["kind"] for outcome in found["outcomes"]) == sorted(ONE_OF_EACH.split())
    unnoticed = {outcome["kind"] for outcome in found["outcomes"] if outcome["noticed_s"] is None}
    assert unnoticed <= {"C5"}, "old weights may be replaced before anybody compares log-probs"
    assert (found["audit"]["steps"], found["audit"]["total_steps"]) == (45, 45)
    assert found["audit"]["times"] == [[4, 80], [5, 80]], "160 prompts, 4 epochs and a half"
    assert found["audit"]["largest_distance"] < 1e-5, "no batch came from other weights than the trainer's"
