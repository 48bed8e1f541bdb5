"""The data and one answer are looked at before a run: what the reward can't compare with is named or skipped."""

import json
import re

import pytest

from actors.model.model_folder import load_tokenizer
from actors.reward.data_check import check_data
from launcher.base.errors import DataError, RewardImportError
from launcher.config.compose import REPOSITORY
from tests.support.composed import composed

GOOD = {"question": "1+1?", "answer": "#### 2"}
REWARD = """
def score(completion, answer):
    return float(completion == answer)

def closed(answer):
    return "" if answer in ("yes", "no") else f"{answer!r} is neither yes nor no"

score.check_answer = closed

def free(completion, answer):
    return float(str(answer) in completion)

def ones(completion, answer):
    return 1.0

def raising(completion, answer):
    raise KeyError("spoon")

def silent(completion):
    return None

def marked(completion, answer):
    return float(completion == f"#### {answer}") if "####" in completion else None
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    (tmp_path / "checked_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)

    def run(records, *settings, fn="actors.reward:gsm8k_reward", **given):
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        words = [f"train_dataset.path={tmp_path / 'd.jsonl'}", "valid_dataset.max_items=2", f"reward.fn={fn}"]
        return check_data(composed("conf=arithmetic_cpu", "train_dataset.batch_size=1", *words, *settings), **given)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["it is 2", "2 ####", "#### two", 2, ""])
def test_the_rule_of_gsm8k_holds_for_its_own_reward(check, tmp_path, answer):
    message = re.escape(f"{tmp_path / 'd.jsonl'}:2: the answer has no number after ####: {answer!r}")
    with pytest.raises(DataError, match=message) as refused:
        check([GOOD, {"question": "1+1?", "answer": answer}])
    assert "so says reward.fn=actors.reward:gsm8k_reward: write the answer so, or name a function" in str(refused.value)


@pytest.mark.slow
def test_answers_without_a_number_are_skipped_where_asked(check, tmp_path):
    (note,) = check([GOOD, {"question": "?", "answer": "two"}], "train_dataset.bad_records=skip")
    assert note.startswith(f"train_dataset: 1 record skipped, such as {tmp_path / 'd.jsonl'}:2: the answer has no")
    with pytest.raises(DataError, match="holds no record that fits"):
        check([{"question": "?", "answer": "two"}], "train_dataset.bad_records=skip")


@pytest.mark.slow
def test_a_function_of_ones_own_declares_its_own_rule_or_none(check):
    with pytest.raises(DataError, match=r"d.jsonl:1: '#### 2' is neither yes nor no"):
        check([GOOD], fn="checked_rewards:score")
    lists = [{"question": "?", "answer": [7, "seven"]}]
    (note,) = check(lists, "valid_dataset=null", fn="checked_rewards:ones")
    assert note.startswith("train_dataset: reward.fn gives right answers no more than wrong ones")


def test_one_answer_is_scored(check):
    said = r"can't score the answer of .*/d.jsonl:1 itself: KeyError: 'spoon' \(checked_rewards.py:17\)"
    with pytest.raises(RewardImportError, match=said):
        check([GOOD], fn="checked_rewards:raising")
    with pytest.raises(RewardImportError, match=r"no score to the right answer of .*d.jsonl:1, .* no answer \(None\)"):
        check([GOOD], fn="checked_rewards:silent")


def test_a_batch_that_no_epoch_fills_is_told(check):
    free = "checked_rewards:free"
    records = [{**GOOD, "question": question} for question in "abc"]
    assert check(records, "train_dataset.batch_size=3", fn=free) == []
    said = ["train_dataset.batch_size=4: no batch is full, as an epoch has 3 prompts"]
    assert check(records, "train_dataset.batch_size=4", fn=free) == said
    assert check(records, "train_dataset.batch_size=4", "train_dataset.weight=1.4", fn=free) == []
    tokenizer = load_tokenizer(REPOSITORY / "assets/arithmetic/model", key="tokenizer_path")
    long = [*records, {**GOOD, "question": "1+1+1+1+1=?"}]
    notes = check(long, "train_dataset.batch_size=4", "train_dataset.max_length=12", fn=free, tokenizer=tokenizer)
    assert notes == ["train_dataset: 1 prompt left out, over train_dataset.max_length", *said]


def test_tools_that_no_record_has_are_told(check):
    """A column that is misspelt would train an agent without its tools."""
    free = "checked_rewards:free"
    records = [GOOD, {**GOOD, "question": "2+2?", "tools": []}]
    assert check(records, "train_dataset.tools_key=tools", "valid_dataset=null", fn=free) == []
    said = ["train_dataset.tools_key=tool: no record has that field, so no prompt has tools"]
    assert check(records, "train_dataset.tools_key=tool", "valid_dataset=null", fn=free) == said


def test_a_dry_run_says_what_was_read_measured_and_scored(check):
    tokenizer = load_tokenizer(REPOSITORY / "assets/arithmetic/model", key="tokenizer_path")
    told = []
    records = [GOOD, {**GOOD, "question": "10+1+1=?"}]
    assert check(records, tokenizer=tokenizer, context=256, tell=told.append) == []
    assert told[0] == (
        "train_dataset: 2 records read; the longest prompt has 16 tokens; the first answer, as it stands, is scored 1"
    )
    assert told[1].startswith("valid_dataset: 2 records read; ")
    beginning = "the first prompt of train_dataset, as the model gets it: "
    assert told[2:] == [beginning + r"'<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n'"]
    told.clear()
    long = [{**GOOD, "question": f"{'1+' * 500}1=?"}]
    check(long, "chat.question_suffix=' Box it.'", tokenizer=tokenizer, tell=told.append)
    shortened = r"'<\|im_start\|>user\\n(1\+)+1? … \(\d+ characters more\) … .* Box it\.<\|im_end\|>.*'"
    assert re.fullmatch(beginning + shortened, told[2])
    assert len(told[2]) < 700
    told.clear()
    unmarked = [{**GOOD, "answer": "2"}]
    assert check(unmarked, "valid_dataset=null", fn="checked_rewards:marked", tell=told.append) == []
    assert told[0] == (
        "train_dataset: 1 record read; prompts were not measured, as tokenizer or chat template is missing here; "
        "the first answer, as it stands, is scored no answer"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("nobody", "rollout.episode='tests.support.episodes.agents:nobody'.* has no 'nobody'"),
        ("not_async", "is not async"),
    ],
)
def test_an_agent_is_imported_and_no_answer_is_asked_for(check, agent, said):
    record = {"question": "1+1?", "answer": "no number"}
    plays = "rollout.episode=tests.support.episodes.agents:asks_nothing"
    told = []
    assert check([record], plays, tell=told.append) == []
    assert told[0].endswith("agents:asks_nothing was not played")
    with pytest.raises(RewardImportError, match=said):
        check([record], f"rollout.episode=tests.support.episodes.agents:{agent}")


def test_the_length_of_the_run_is_told(check):
    told = []
    free = "checked_rewards:free"
    check([{**GOOD, "question": question} for question in "abc"], fn=free, tell_length=told.append)
    assert told[0] == "3 steps: 1 epoch of 3 prompts by 1; for more: a larger total_train_epochs"
    told.clear()
    check([GOOD], "train_dataset.max_length=12", fn=free, tell_length=told.append)
    assert told[0].startswith("at most 1 step: 1 epoch of 1 prompt by 1")
