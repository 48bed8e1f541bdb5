"""The settings of data and rewards: which records, how they become prompts, and what scores the completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.config.settings import COUNT, DEADLINE, MISSING, POSITIVE, matching, same_as, setting

TEXT_ENDINGS = (".jsonl", ".json", ".csv")
DATA_ENDINGS = (".parquet", *TEXT_ENDINGS, ".arrow")
"""Of the files that hold records (actors/data/record_sources.py reads them)."""
PACKED_ENDINGS = (".gz", ".zst", ".bz2")
"""Behind one of TEXT_ENDINGS."""


def data_ending(path: str | Path) -> str:
    """`.jsonl` of `a.jsonl` and of `a.jsonl.gz`; "" where the file is none of records."""
    last, inner = Path(path).suffix, Path(Path(path).stem).suffix
    if last in PACKED_ENDINGS:
        return inner if inner in TEXT_ENDINGS else ""
    return last if last in DATA_ENDINGS else ""


@dataclass
class DatasetConfig:
    """Records of any columns (docs/data_rewards_episodes.md)."""

    path: str = setting(
        MISSING, f"source of the records: a hub name, a {', '.join(DATA_ENDINGS)} file, or a folder of such files"
    )
    prompt_key: str = setting("question", "column of the question, a text; not read where messages_key is given")
    messages_key: str | None = setting(
        None, "column of chat messages, a list of {role, content}; null: the text in prompt_key is the user's message"
    )
    tools_key: str | None = setting(None, "column of the tools that the chat template writes; null: none")
    answer_key: str | None = setting(
        "answer", "column of the answer, of any type, which the reward function gets; null: there is none"
    )
    bad_records: Literal["refuse", "skip"] = setting(
        "refuse",
        "treatment of a record that does not fit; refuse: the run does not start and names the line; skip: the "
        "record is skipped and counted",
    )
    name: str | None = setting(None, "configuration name of a hub data set, e.g. main; null: none")
    split: str = setting("train", "split of a hub data set")
    batch_size: int = setting(16, "number of prompts per step", COUNT)
    shuffle: bool = setting(True, "use a new order, drawn from the seed, in each epoch")
    max_length: int | None = setting(
        None,
        "upper limit of a prompt's length, in tokens; longer prompts are left out, and their number is reported; "
        "null: no limit",
        COUNT,
    )
    max_items: int | None = setting(None, "number of first records that are used; null: all", COUNT)
    weight: float = setting(
        1.0, "how often each record of this training data set is in an epoch (docs/data_rewards_episodes.md)", POSITIVE
    )


@dataclass
class HeldOutConfig(DatasetConfig):
    """Held-out records: columns as those of train_dataset."""

    prompt_key: str = same_as("train_dataset.prompt_key", "column of the question, a text")
    messages_key: str | None = same_as(
        "train_dataset.messages_key", "column of chat messages, a list of {role, content}"
    )
    tools_key: str | None = same_as("train_dataset.tools_key", "column of the tools that the chat template writes")
    answer_key: str | None = same_as("train_dataset.answer_key", "column of the answer, which the reward function gets")
    bad_records: Literal["refuse", "skip"] = same_as(
        "train_dataset.bad_records",
        "treatment of a record that does not fit; refuse: the run does not start and names the line; skip: the "
        "record is skipped and counted",
    )


FUNCTIONS = matching(
    r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(\s*\+\s*[A-Za-z_][\w.]*:[A-Za-z_]\w*)*",
    "module:function, e.g. my_rewards.maths:score, or several joined by +",
)


@dataclass
class FurtherConfig(HeldOutConfig):
    """One of several data sets, by a name of the user's."""

    reward_fn: str | None = setting(
        None, "reward function of this data set alone, by import path; null: reward.fn", FUNCTIONS
    )


FURTHER = ("train_datasets", "valid_datasets")

NO_TEMPLATE = "none"
TEMPLATE_ENDING = ".jinja"
WRITTEN_BY_US = ("add_generation_prompt", "chat_template", "conversation", "return_dict", "tokenize", "tools")
"""Arguments of a template that are no variables for users."""


def unknown_template(template: str, names: Sequence[str], *, tokenizer: str) -> tuple[str, str]:
    """What to say, and to change, of a chat.template that is no file and none of the tokenizer's `names`."""
    without = f"leave chat.template out for that of the tokenizer in {tokenizer}"
    if template.endswith(TEMPLATE_ENDING) or len(Path(template).parts) > 1:
        what = f"chat.template={template}: there is no file {Path(template).absolute()}"
        return what, f"give the path of a {TEMPLATE_ENDING} file, or {without}"
    what = f"chat.template={template}: no template of the tokenizer in {tokenizer} has that name, and no file here"
    known = f"one of {', '.join(names)}, or " if names else ""
    return what, f"give {known}the path of a {TEMPLATE_ENDING} file, or {without}"


@dataclass
class ChatConfig:
    """How a record becomes the tokens of a prompt."""

    template: str | None = setting(
        None,
        "chat template: a .jinja file, or the name of one of the tokenizer's; null: the tokenizer's default; "
        "none: the question's text alone",
    )
    template_kwargs: dict[str, Any] = setting(
        {}, "variables of the chat template, by name, e.g. `+chat.template_kwargs.enable_thinking=false`"
    )
    system_prompt: str | None = setting(
        None, "system message of each chat that has none of its own; null: none is added"
    )
    question_suffix: str | None = setting(
        None,
        "text added after each question (in a chat, after the user's last message), e.g. how to mark the answer; "
        "null: none",
    )


@dataclass
class RewardConfig:
    fn: str = setting(
        "actors.reward:gsm8k_reward",
        "reward function by import path (docs/data_rewards_episodes.md)",
        FUNCTIONS,
    )
    weights: list[float] = setting([], "weights of several reward functions, in the order of reward.fn; empty: 1 each")
    canaries: str | None = setting(
        None, "a .jsonl file of completions known to be good or bad; null: they are made from the data set's answers"
    )
    timeout: float = setting(15.0, "deadline of scoring one completion, in seconds", DEADLINE)
    setup_timeout: float = setting(
        120.0,
        "longest time that a process may take to import the reward function, or the episode's function, in seconds",
        DEADLINE,
    )
    workers: int = setting(1, "number of processes that score completions", COUNT)
    max_growth_gb: float | None = setting(
        4.0,
        "growth of a scoring process's memory, since its first completions, after which it is replaced, in GB; "
        "null: any",
        POSITIVE,
    )
