"""The order of a run's prompts, read again from its settings and its data; or why it is not known."""

import pytest

from actors.data.run_order import read_prompt_order
from tests.support.made_ledger import TRAIN, MadeRun


def changed(run, before, after):
    text = run.paths.config.read_text()
    assert before in text
    run.paths.config.write_text(text.replace(before, after))


def test_it_is_that_of_the_run_s_queue(tmp_path):
    further = tmp_path / "further.jsonl"
    further.write_text("".join(TRAIN.read_text().splitlines(keepends=True)[200:240]))
    more = {"path": str(further), "weight": 1.5}
    run = MadeRun(tmp_path / "run", datasets={"train_dataset": {"path": str(TRAIN)}, "train_datasets.more": more})
    assert read_prompt_order(run.paths).fingerprint == run.queue.prompt_order.fingerprint


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("train.jsonl", "gone.jsonl", "gone.jsonl is not on this machine"),
        ("prompt_key: question", "prompt_key: text", "the record has no text"),
        ("train_dataset:", "other:", "config.yaml does not have the run's data set"),
        ("\nseed: 1", "\nseed: null", "config.yaml does not have the run's seed"),
    ],
)
def test_why_it_is_not_known_is_said(tmp_path, before, after, why):
    run = MadeRun(tmp_path)
    changed(run, before, after)
    assert why in read_prompt_order(run.paths)


def test_settings_of_a_data_set_that_are_none_are_said(tmp_path):
    run = MadeRun(tmp_path)
    run.paths.config.write_text("seed: 1\ntrain_dataset: 7\n")
    assert "does not have the run's data set" in read_prompt_order(run.paths)
    run.paths.config.unlink()
    assert "does not have the run's data set" in read_prompt_order(run.paths)
