"""Where a ledger ends, and what the files beside it say then: of runs that go on, were killed, or began again."""

import json
import shutil

import pytest
import yaml

from actors.data.run_order import read_prompt_order
from launcher.html_report.page_facts import page_facts
from launcher.reporting.run_facts import read_facts
from launcher.run_files.journal import read_lines
from tests.support.made_ledger import MadeRun


def audited(run, **more):
    return read_facts(run.paths, order=read_prompt_order(run.paths), **more).audit


@pytest.fixture
def run(tmp_path):
    """58 steps of 120, saved after each seventh and after the last; nobody has ended it."""
    run = MadeRun(tmp_path / "run")
    run.take_steps(58)
    return run


def of_line(at, **change):
    return lambda lines: [line | change if n == at else line for n, line in enumerate(lines)]


def change_settings(run, name, **change):
    settings = yaml.safe_load(run.paths.config.read_text())
    (run.paths.logs / name).write_text(yaml.safe_dump(settings | change))


# ── nobody says that it has ended ──


@pytest.mark.parametrize("also_metrics", [False, True])
def test_a_ledger_that_lacks_its_end_is_not_taken_for_one_that_is_being_written(run, also_metrics):
    run.change(run.paths.ledger, lambda lines: lines[:50])
    if also_metrics:
        run.change(run.paths.metrics, lambda lines: lines[:50])
    found = audited(run)
    assert found.problems == ()
    assert any("the ledger ends with step 49, and step 57 is written elsewhere" in one for one in found.not_known)


def test_of_a_run_whose_driver_is_gone_the_last_step_counts_too(run):
    run.change(run.paths.ledger, lambda lines: lines[:-1])
    assert audited(run).problems == ()
    assert audited(run, is_live=False).problems == (
        "metrics of steps that the ledger has not: [57]",
        "the ledger ends with step 56, the checkpoint with step 57",
    )


def test_a_last_line_of_a_step_far_ahead_is_not_being_written(run):
    run.change(run.paths.ledger, of_line(57, global_step=570))
    problems = audited(run).problems
    assert any("steps never committed: [57, 58" in one for one in problems), problems


def test_a_kill_between_the_two_lines_of_a_step_is_no_problem(run):
    run.change(run.paths.metrics, lambda lines: lines[:-1])
    assert audited(run, is_live=False).problems == ()
    run.change(run.paths.metrics, lambda lines: lines[:-1])
    assert audited(run, is_live=False).problems == ("steps without metrics: [56, 57]",)


@pytest.mark.parametrize("word", ["aborted", "errored"])
@pytest.mark.parametrize("is_live", [None, False, True])
def test_a_run_that_was_ended_between_the_two_lines_of_a_step_has_no_problem(run, word, is_live):
    run.finish(word)
    run.change(run.paths.metrics, lambda lines: lines[:-1])
    assert audited(run, is_live=is_live).problems == ()
    run.change(run.paths.metrics, lambda lines: lines[:-1])
    assert audited(run, is_live=is_live).problems == ("steps without metrics: [56, 57]",)


def test_a_step_that_a_finished_run_has_no_metrics_of_is_a_problem(run):
    run.take_steps(120)
    run.finish()
    run.change(run.paths.metrics, lambda lines: lines[:-1])
    assert audited(run).problems == ("steps without metrics: [119]",)


@pytest.mark.parametrize("word", ["aborted", "errored"])
def test_a_run_that_was_ended_and_lacks_more_than_its_last_metrics_has_lost_them(run, word):
    run.finish(word)
    run.change(run.paths.metrics, lambda lines: [line for line in lines if line["global_step"] != 40])
    assert audited(run).problems == ("steps without metrics: [40]",)
    run.change(run.paths.ledger, lambda lines: lines[:-1])
    assert audited(run).problems == (
        "steps without metrics: [40]",
        "metrics of steps that the ledger has not: [57]",
        "the ledger ends with step 56, the checkpoint with step 57",
    )


# ── what the checkpoint vouches for ──


def test_what_was_lost_since_the_newest_checkpoint_is_not_known(run):
    run.store.set_aside_after(48)
    found = audited(run)
    assert (found.problems, found.loss_known_until) == ((), 48)
    (said,) = found.not_known
    assert "prompts of epoch 5 were lost after step 48" in said
    assert page_facts(read_facts(run.paths), is_live=None, at=1e9)["ledger"]["complete_until"] == 48


def test_an_epoch_that_is_complete_has_lost_nothing_whatever_the_checkpoint(run):
    run.take_steps(60)
    run.store.set_aside_after(55)
    found = audited(run)
    assert (found.problems, found.not_known, found.loss_known_until) == ((), (), 59)


def test_a_position_that_is_not_what_was_saved_is_no_evidence(run):
    newest = max(run.paths.default_checkpoints.glob("epoch*"), key=lambda one: one.stat().st_mtime) / "position.json"
    state = json.loads(newest.read_text())
    state["position"]["next_step"] -= 5
    newest.write_text(json.dumps(state))
    found = audited(run)
    assert found.loss_known_until is None
    assert any("position.json" in one and "manifest" in one for one in found.not_known), found.not_known


# ── steps that are there twice ──


@pytest.mark.parametrize("at", [0, 31, 57])
def test_a_ledger_line_twice_without_a_restore_is_named(run, at):
    run.change(run.paths.ledger, lambda lines: [*lines[: at + 1], *lines[at:]])
    problems = audited(run).problems
    assert problems == (f"step {at}: the ledger has it again, and no restore to step {at - 1} is recorded",)


def test_metrics_that_go_back_without_a_restore_are_named(run):
    run.change(run.paths.metrics, lambda lines: [*lines[:32], lines[31] | {"time": 1.5}, *lines[32:]])
    assert audited(run).problems == ("step 31: the metrics have it again, and no restore to step 30 is recorded",)


# ── attempts with other settings ──


def test_each_attempt_has_its_own_bound_of_staleness(run):
    one_behind = {"attempt": 2, "weight_versions": [56, 57]}
    run.change(run.paths.ledger, of_line(57, **one_behind))
    assert audited(run).problems == ("step 57: tokens of other weights than its own",)
    change_settings(run, "config.attempt2.yaml", rollout={"max_head_offpolicyness": 1})
    assert audited(run).problems == ()
    run.change(run.paths.ledger, of_line(56, weight_versions=[55]))
    assert audited(run).problems == ("step 56: tokens of other weights than its own",)


def test_without_settings_a_bound_of_staleness_is_not_known(run):
    run.change(run.paths.ledger, of_line(57, weight_versions=[56, 57]))
    run.paths.config.unlink()
    found = audited(run)
    assert found.problems == ()
    assert "whether tokens are older than rollout.max_head_offpolicyness allows: " in found.not_known[0]
    run.change(run.paths.ledger, of_line(57, weight_versions=[58]))
    assert audited(run).problems == ("step 57: tokens of other weights than its own",), "of weights still to come"


def test_a_data_set_that_has_moved_between_attempts_is_read_where_it_is_now(run, tmp_path):
    settings = yaml.safe_load(run.paths.config.read_text())
    here = tmp_path / "moved.jsonl"
    shutil.copy(settings["train_dataset"]["path"], here)
    gone = settings["train_dataset"] | {"path": str(tmp_path / "gone.jsonl")}
    change_settings(run, "config.attempt2.yaml", train_dataset=settings["train_dataset"] | {"path": str(here)})
    change_settings(run, "config.yaml", train_dataset=gone)
    assert audited(run).not_known == ()


def test_of_several_settings_those_of_the_checkpoint_s_data_are_taken(run):
    settings = yaml.safe_load(run.paths.config.read_text())
    change_settings(run, "config.attempt2.yaml", seed=2)
    assert audited(run).not_known == ()
    change_settings(run, "config.attempt2.yaml")
    change_settings(run, "config.yaml", train_dataset=settings["train_dataset"] | {"max_items": 100})
    assert audited(run).not_known == ()


# ── events that are gone ──


def test_without_the_trainer_s_event_the_data_set_says_how_many_prompts_there_are(run):
    run.change(run.paths.events, lambda lines: [line for line in lines if line["event"] != "trainer.started"])
    assert audited(run).problems == ()
    assert [*read_lines(run.paths.events)], "others are there"
    assert read_facts(run.paths).audit is None


def test_without_any_restore_in_the_events_nobody_is_accused_of_taking_a_step_twice(run):
    run.change(run.paths.ledger, lambda lines: [*lines[:32], *lines[31:]])
    run.change(run.paths.events, lambda lines: [])
    found = audited(run)
    assert found.problems == ()
    assert any("no restore is recorded at all" in one for one in found.not_known), found.not_known
