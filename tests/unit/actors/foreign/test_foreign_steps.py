"""The steps of another project's trainer: written once, undone by a restore, timed over the bundles they come in."""

import asyncio
import time
from dataclasses import replace

import pytest

from actors.foreign.foreign_checkpoints import ASIDE, ForeignCheckpoints, damage_in, set_aside
from actors.foreign.foreign_steps import ForeignSteps, standing_lines
from launcher.adapters.trainer_adapter import StepSeen, adapter_of
from launcher.base.errors import RunError
from launcher.config.foreign import ForeignTrainerConfig
from launcher.config.schema import RunConfig
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.run_files.journal import Journal, current_lines, read_lines
from tests.support.worlds.foreign import Recorded, resume_from


def take(steps, *numbers, now=0.0):
    for number in numbers:
        steps.take_step(StepSeen(step=number, reward=0.5), now + number)
    steps.write()


def test_each_step_is_written_once_and_a_repeated_line_says_nothing_new(paths):
    steps = ForeignSteps(paths, 1, list(read_lines(paths.events)))
    take(steps, 1, 2, 2, 3)
    assert [line["global_step"] for line in read_lines(paths.metrics)] == [1, 2, 3]
    assert (steps.committed, steps.last_step, steps.median_step_s) == (3, 3, 1.0)
    take(steps, 2, now=10.0)  # it went back by itself
    assert [line["global_step"] for line in steps.lines] == [1, 2]


def test_a_time_that_it_can_not_have_been_does_not_count(paths):
    steps, began = ForeignSteps(paths, 1, list(read_lines(paths.events))), time.time()
    steps.begin(-1)
    elapsed, thousandths, elsewhere = 12.5, began * 1000, began - 8 * 3600
    for step, at in enumerate((elapsed, thousandths, elsewhere), 1):
        steps.take_step(StepSeen(step=step, reward=0.5, at=at), float(step))
        assert began <= steps.lines[-1]["time"] <= time.time()


def test_times_of_steps_that_come_late_and_together_are_kept(paths, monkeypatch):
    steps = ForeignSteps(paths, 1, list(read_lines(paths.events)))
    steps.begin(-1)
    began = time.time()
    monkeypatch.setattr(time, "time", lambda: began + 600)
    for step in (1, 2, 3):
        steps.take_step(StepSeen(step=step, reward=0.5, at=began + 10 * step), 600.0)
    assert [line["time"] - began for line in steps.lines] == pytest.approx([10, 20, 30])


def test_a_restore_undoes_the_later_steps_before_they_are_repeated_too(paths):
    steps = ForeignSteps(paths, 1, list(read_lines(paths.events)))
    take(steps, 1, 2, 3, 4)
    Journal(paths.events, 1).record("trainer.restored", subject="trainer", global_step=2)
    steps.begin(2)
    assert [line["global_step"] for line in steps.lines] == [1, 2]
    assert [line["global_step"] for line in standing_lines(read_lines(paths.events), paths.metrics)] == [1, 2]
    take(steps, 3)
    again = ForeignSteps(paths, 2, list(read_lines(paths.events)))
    assert [line["global_step"] for line in again.lines] == [1, 2, 3]
    assert again.seen_now is None


def test_a_restore_that_was_a_mistake_has_undone_no_step_and_the_one_that_showed_it_is_not_written(paths):
    steps = ForeignSteps(paths, 1, list(read_lines(paths.events)))
    take(steps, 1, 2, 3, 4, 5)
    journal = Journal(paths.events, 1)
    journal.record("trainer.restored", subject="trainer", global_step=1)
    steps.begin(1)
    assert steps.take_step(StepSeen(step=2, reward=0.0), 9.0)
    journal.record("health.outside_weights", subject="environment", onset_step=5, global_step=1)
    steps.withdraw(list(read_lines(paths.events)))
    steps.write()
    assert [line["global_step"] for line in steps.lines] == [1, 2, 3, 4, 5]
    assert [line["global_step"] for line in standing_lines(read_lines(paths.events), paths.metrics)] == [1, 2, 3, 4, 5]
    journal.record("trainer.restored", subject="trainer", global_step=4)
    again = ForeignSteps(paths, 2, list(read_lines(paths.events)))
    again.begin(4)
    take(again, 5)
    assert [line["global_step"] for line in ForeignSteps(paths, 3, list(read_lines(paths.events))).lines] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert [line["global_step"] for line in current_lines(read_lines(paths.metrics))] == [1, 2, 3, 4, 5]


def test_a_restore_that_was_begun_again_before_it_was_a_mistake_has_undone_none(paths):
    """Its trainer crashed before its first steps could show anything: of two restores to one step the first still
    counted, and a supervisor that took over passed over the checkpoints that were put back."""
    steps = ForeignSteps(paths, 1, list(read_lines(paths.events)))
    take(steps, 1, 2, 3, 4, 5)
    journal = Journal(paths.events, 1)
    for _ in range(2):
        journal.record("trainer.restored", subject="trainer", global_step=1)
    journal.record("health.outside_weights", subject="environment", onset_step=5, global_step=1)
    again = ForeignSteps(paths, 1, list(read_lines(paths.events)))
    assert [line["global_step"] for line in again.lines] == [1, 2, 3, 4, 5]


def test_a_line_of_metrics_that_is_no_step_is_none(paths):
    steps = ForeignSteps(paths, 1, list(read_lines(paths.events)))
    take(steps, 1, 2)
    with paths.metrics.open("a") as file:
        file.write(f'{{"global_step": {10**30}}}\n{{"global_step": true}}\n{{"global_step": "1"}}\n[1]\n{{"glob')
    again = ForeignSteps(paths, 1, list(read_lines(paths.events)))
    assert [line["global_step"] for line in again.lines] == [1, 2]


def test_what_is_set_aside_keeps_its_content_and_never_replaces_another(tmp_path):
    for content in ("first", "second"):
        folder = tmp_path / "out" / "step-5"
        folder.mkdir(parents=True)
        (folder / "part").write_text(content)
        set_aside(folder, "condemned", folder.parent / ASIDE)
    kept = sorted((tmp_path / "out" / "set_aside").iterdir())
    assert [path.name for path in kept] == ["step-5.condemned-1", "step-5.condemned-2"]
    assert [(path / "part").read_text() for path in kept] == ["first", "second"]


def test_what_no_run_has_seen_is_not_moved(tmp_path):
    folder = tmp_path / "out" / "step-5"
    folder.mkdir(parents=True)
    config = RunConfig()
    config.trainer = ForeignTrainerConfig(
        command="x", cwd=str(tmp_path), pattern="(?P<step>1)", checkpoints="out/step-*"
    )
    found = ForeignCheckpoints(
        config,
        adapter_of(replace(config.trainer, adapter="command")),
        history=Recorded(events=[], attempts=[]),
        are_ours=False,
    )
    with pytest.raises(RunError, match="nothing is moved"):
        resume_from(found, [], None)
    assert folder.is_dir()


def test_why_one_is_set_aside_is_said(tmp_path):
    for step in (5, 10):
        (tmp_path / "out" / f"step-{step}").mkdir(parents=True)
    config, history = RunConfig(), Recorded(events=[], attempts=[])
    config.trainer = ForeignTrainerConfig(
        command="x", cwd=str(tmp_path), pattern="(?P<step>1)", checkpoints="out/step-*", checkpoint_file="done"
    )
    found = ForeignCheckpoints(config, adapter_of(replace(config.trainer, adapter="command")), history, are_ours=True)
    assert resume_from(found, [], None) == FIRST_WEIGHTS
    asyncio.run(found.clear(after=FIRST_WEIGHTS, is_condemned=False))
    ((name, facts),) = history.events
    assert (name, facts["reason"]) == ("checkpoint.set_aside", "after step -1; step-10: done is not there yet")


def test_a_torn_safetensors_file_is_damage_and_other_files_are_not_opened(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(b"anything")
    assert damage_in(tmp_path) == ""
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert "model.safetensors" in damage_in(tmp_path)
