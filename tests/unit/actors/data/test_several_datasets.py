"""Several data sets, each read, checked and scored as its own settings say."""

import asyncio
import json

import pytest

from actors.data.dataset import load_records
from actors.data.training_data import DataLoader
from actors.reward.data_check import check_data
from actors.reward.reward_pool import RewardPool
from launcher.base.errors import ConfigError, DataError, RewardImportError
from launcher.resources.config_checks import find_problems
from launcher.run_files.journal import Journal
from tests.support.composed import composed

REWARD = """
def one(completion): return 1.0
def two(completion): return 2.0
def broken(completion, answer): return answer["no"]
"""
SAME = {"question": "1+1?", "answer": "#### 2"}


@pytest.fixture
def made(tmp_path, monkeypatch):
    (tmp_path / "several_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)

    def config(*settings, **files):
        for name, records in ({"main": [SAME], "held": [SAME]} | files).items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        paths = [f"train_dataset.path={tmp_path / 'main.jsonl'}", f"valid_dataset.path={tmp_path / 'held.jsonl'}"]
        paths += [f"+train_datasets.{name}.path={tmp_path / name}.jsonl" for name in files if name != "main"]
        return composed("conf=arithmetic_cpu", "train_dataset.batch_size=1", *paths, *settings)

    return config


class WordTokenizer:
    chat_template = "x"
    name_or_path = "words"

    def apply_chat_template(self, conversation, **_):
        texts = [chat[-1]["content"] for chat in conversation]
        return {"input_ids": [list(range(len(text))) for text in texts]}


def test_the_same_record_in_two_data_sets_is_two_prompts_scored_by_two_functions(made, tmp_path):
    more = "+valid_datasets.b.path=" + str(tmp_path / "b.jsonl")
    config = made(
        *("reward.fn=several_rewards:one", "+train_datasets.b.reward_fn=several_rewards:two", more),
        *("+train_datasets.b.weight=1.5",),
        b=[SAME, {"question": "2+2?", "answer": "#### 4"}],
    )
    assert not find_problems(config)
    assert [note for note in check_data(config) if "wrong ones" not in note] == []  # these rewards are always the same
    records = {key: load_records(dataset, key=key) for key, dataset in config.datasets().items()}
    loader = DataLoader(config, WordTokenizer(), None, Journal(tmp_path / "events.jsonl", 1, lambda: 0.0))
    data = loader.load(records)
    digest = next(one for one in data.prompts if ":" not in one)
    assert {f"b:{digest}", f"b:{digest}*2", digest} <= data.prompts.keys()
    assert len(data.prompts) == 1 + 4
    assert [(len(circle.ids), circle.in_epoch) for circle in data.circles] == [(2, 1)]
    assert len(data.held_out) == 3
    with RewardPool(config.reward, config.own_rewards()) as pool:
        scores = [asyncio.run(pool.score(["x"], data.prompts[one]))[0].value for one in (digest, f"b:{digest}*2")]
    assert scores == [1.0, 2.0]


@pytest.mark.slow
def test_one_answer_of_each_is_scored_before_a_run(made):
    with pytest.raises(RewardImportError, match="several_rewards:broken"):
        check_data(made("+train_datasets.b.reward_fn=several_rewards:broken", b=[SAME]))
    own = made("+train_datasets.b.reward_fn=several_rewards:one", b=[{"question": "?", "answer": "two"}])
    (note,) = check_data(own)
    assert note.startswith("train_datasets.b: whether reward.fn gives right answers more than wrong ones could not be")


@pytest.mark.slow
def test_a_record_that_does_not_fit_is_named_by_data_set_file_and_line(made, tmp_path):
    bad = [SAME, {"question": "?", "answer": "two"}, {"answer": "#### 1"}]
    with pytest.raises(DataError, match=r"b.jsonl:3: the record has no question") as refused:
        check_data(made(b=bad))
    assert "train_datasets.b.prompt_key" in refused.value.hint
    (note,) = check_data(made("+train_datasets.b.bad_records=skip", b=bad))
    assert note.startswith(f"train_datasets.b: 2 records skipped, such as {tmp_path / 'b.jsonl'}:3")


def test_columns_follow_the_first_data_set_until_given(made):
    config = made("train_dataset.prompt_key=q", "+train_datasets.c.prompt_key=question", b=[SAME], c=[SAME])
    assert [config.train_datasets[name].prompt_key for name in "bc"] == ["q", "question"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["+train_datasets.main.path=x"], "train_datasets.main.path=x: a further data set's name has letters"),
        (["+valid_datasets.a-b.path=x"], "valid_datasets.a-b.path=x: a further data set's name has letters"),
        (
            ["+valid_datasets.b.path=x", "+valid_datasets.b.reward_fn=a:b", "+train_datasets.b.reward_fn=a:c"],
            "or that of",
        ),
    ],
)
def test_what_can_not_be_used_is_refused_with_its_key(made, settings, said):
    assert said in "\n".join(map(str, find_problems(made(*settings, b=[SAME]))))


def test_a_further_data_set_without_a_path_is_one_message(made):
    for name in ("main", "more"):
        (problem,) = map(str, find_problems(made(f"+train_datasets.{name}.path=")))
        assert problem.startswith(f"train_datasets.{name}.path='': a ")


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [("weight=0", "more than 0"), ("weight=much", "of type float"), ("reward_fn=no", "allowed: module:function")],
)
def test_a_wrong_value_of_a_further_data_set_is_refused(made, setting, allowed):
    with pytest.raises(ConfigError, match=rf"train_datasets\.b\.{setting}: .*{allowed}"):
        made(f"+train_datasets.b.{setting}", b=[SAME])


def test_an_unknown_key_of_a_further_data_set_is_refused(made):
    with pytest.raises(ConfigError, match=r"train_datasets.b"):
        made("+train_datasets.b.weigth=2", b=[SAME])
    with pytest.raises(ConfigError, match=r"train_datasets.b=x: a section of settings"):
        made("+train_datasets.b=x")
    with pytest.raises(ConfigError, match=r"no value for train_datasets.c.path"):
        made("+train_datasets.c.weight=2", b=[SAME])
