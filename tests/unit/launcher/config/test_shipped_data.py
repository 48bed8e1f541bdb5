"""Held-out data of a preset beside training data of one's own is noted."""

import pytest

from launcher.config.shipped_data import foreign_held_out
from launcher.resources.config_checks import check
from tests.support.composed import composed

OWN = "train_dataset.path=my_problems.jsonl"
WITHOUT = ("valid_dataset=null", "evaluator.freq_steps=null")


@pytest.mark.parametrize(
    ("preset", "interval"),
    [
        ("arithmetic_cpu", "freq_steps"),
        ("arithmetic_tool_cpu", "freq_steps"),
        ("gsm8k_h200", "freq_epochs"),
        ("gsm8k_one_24gb", "freq_epochs"),
    ],
)
def test_the_held_out_data_of_a_preset_is_noted_beside_other_training_data(preset, interval):
    note = foreign_held_out(composed(f"conf={preset}", OWN))
    assert "is the preset's, and train_dataset.path is not" in note
    without = f"valid_dataset=null evaluator.{interval}=null"
    assert note.endswith(f"Set valid_dataset.path, or {without}")
    assert foreign_held_out(composed(f"conf={preset}", OWN, *without.split())) == ""


@pytest.mark.parametrize("settings", [(OWN, "valid_dataset.path=mine.jsonl"), (OWN, *WITHOUT), ()])
def test_nothing_is_noted_where_both_or_neither_are_the_presets(settings):
    config = composed("conf=arithmetic_cpu", *settings)
    check(config)
    assert foreign_held_out(config) == ""
