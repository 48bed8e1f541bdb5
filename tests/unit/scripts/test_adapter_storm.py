"""What a fault on another project's trainer cost, by the lines of metrics.jsonl; and a range without room."""

import pytest

from scripts.adapter_storm import Cost, cost_of, main

TOOK = [(1.0, 0), (2.0, 1), (3.0, 2), (13.0, 1), (14.0, 2), (15.0, 3), (16.0, 4)]
LINES = [{"time": moment, "global_step": step} for moment, step in TOOK]


@pytest.mark.parametrize(
    ("at", "cost"),
    [
        (3.5, Cost(after_step=2, seconds=11.5, steps_again=2)),
        (15.5, Cost(after_step=3, seconds=0.5, steps_again=0)),
        (16.5, Cost(after_step=4, seconds=None, steps_again=0)),
        (0.5, Cost(after_step=-1, seconds=0.5, steps_again=0)),
    ],
)
def test_a_fault_costs_the_time_to_a_new_step_and_the_steps_taken_again(at, cost):
    assert cost_of(LINES, at) == cost


def test_more_faults_than_steps_are_refused_before_anything_is_started(capsys, tmp_path):
    settings = ("trainer.command='python t.py'", f"cluster.fileroot={tmp_path}/runs")
    assert main(["command", "--steps", "3", "5", "--", *settings]) == 2
    assert "--steps 3 5 has no room for 3 faults" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
