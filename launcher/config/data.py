"""The settings of data and rewards: which records, how they become prompts, and what scores the completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.settings import COUNT, DEADLINE, MISSING, POSITIVE, Matching, OneOf, same_as, setting

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
    """Records of any columns (docs/your_data.md)."""

    path: str = setting(MISSING, f"hub name, a {', '.join(DATA_ENDINGS)} file, or a folder of those")
    prompt_key: str = setting("question", "column of the question: a text; not read where messages_key is given")
    messages_key: str | None = setting(
        None, "column of chat messages: a list of {role, content}; null: prompt_key's text is the user's message"
    )
    tools_key: str | None = setting(None, "column of the tools that the chat template writes; null: none")
    answer_key: str | None = setting(
        "answer", "column of the answer, of any type, which the reward function gets; null: there is none"
    )
    bad_records: str = setting(
        "refuse", "a record that doesn't fit: end with its line, or skip and count it", OneOf(("refuse", "skip"))
    )
    name: str | None = setting(None, "the hub's configuration name, e.g. main")
    split: str = setting("train", "the hub's split")
    batch_size: int = setting(16, "prompts per step", COUNT)
    shuffle: bool = setting(True, "a new order, drawn from the seed, in each epoch")
    max_length: int | None = setting(None, "prompts of more tokens are left out, and their number is reported", COUNT)
    max_items: int | None = setting(None, "the first n records only", COUNT)
    weight: float = setting(1.0, "of training data: how often an epoch has each record (docs/your_data.md)", POSITIVE)


@dataclass
class HeldOutConfig(DatasetConfig):
    """Held-out records: columns as those of train_dataset."""

    prompt_key: str = same_as("train_dataset.prompt_key", "column of the question")
    messages_key: str | None = same_as("train_dataset.messages_key", "column of chat messages")
    tools_key: str | None = same_as("train_dataset.tools_key", "column of the tools")
    answer_key: str | None = same_as("train_dataset.answer_key", "column of the answer")
    bad_records: str = same_as(
        "train_dataset.bad_records", "refuse or skip a record that doesn't fit", OneOf(("refuse", "skip"))
    )


FUNCTIONS = Matching(
    r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(\s*\+\s*[A-Za-z_][\w.]*:[A-Za-z_]\w*)*",
    "module:function, e.g. my_rewards.maths:score, or several joined by +",
)


@dataclass
class FurtherConfig(HeldOutConfig):
    """One of several data sets, by a name of the user's."""

    reward_fn: str | None = setting(None, "its own reward function; null: reward.fn", FUNCTIONS)


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
        None, "a .jinja file, or one of the tokenizer's by name; null: its default; none: the question's text alone"
    )
    template_kwargs: dict[str, Any] = setting(
        {}, "variables of the template, e.g. `+chat.template_kwargs.enable_thinking=false`"
    )
    system_prompt: str | None = setting(None, "the system message of each chat that has none of its own")
    question_suffix: str | None = setting(
        None, "text behind each question (of a chat: the user's last message), e.g. how the answer is to be marked"
    )


@dataclass
class RewardConfig:
    fn: str = setting(
        "actors.reward:gsm8k_reward",
        "the reward function by import path, or several joined by + (docs/your_data.md)",
        FUNCTIONS,
    )
    weights: list[float] = setting([], "of the functions in the order of fn; empty: 1 each")
    canaries: str | None = setting(
        None, "a .jsonl file of completions known to be good or bad; null: made of the data set's answers"
    )
    timeout: float = setting(15.0, "of scoring one completion", DEADLINE)
    setup_timeout: float = setting(120.0, "until a process has imported the function, or the episode's", DEADLINE)
    workers: int = setting(1, "processes that score", COUNT)
    max_growth_gb: float | None = setting(
        4.0,
        "GB that a process may grow by after its first completions; then another takes its place; null: any",
        POSITIVE,
    )
