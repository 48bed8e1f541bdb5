"""Reads the data and scores one answer, or imports the agent, before anything is started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from actors.data.dataset import BadRecords, DataRecord, load_records
from actors.data.prompts import ChatTokenizer, build_prompts
from actors.data.training_data import in_epoch
from actors.data.unread_media import media_note
from actors.reward.known_answers import KeptScores, learn_given, read_given
from actors.reward.reward_pool import RewardPool
from actors.reward.reward_trial import try_reward
from actors.reward.user_process import UserProcess
from launcher.base.errors import DataError
from launcher.base.rollouts import Prompt
from launcher.base.wording import counted
from launcher.config.data import DatasetConfig
from launcher.config.schema import RunConfig
from launcher.resources.planned_length import length_lines

SHOWN_CHARS = 300
"""Of a prompt's beginning, and of its end: longer ones would push the plan off the screen."""


def check_data(
    config: RunConfig,
    *,
    tokenizer: ChatTokenizer | None = None,
    context: int | None = None,
    tell: Callable[[str], object] = lambda line: None,
    tell_length: Callable[[str], object] = lambda line: None,
    checkpoint_bytes: int = 0,
    keep: dict[str, list[Prompt]] | None = None,
) -> list[str]:
    """Read every record, and score answers of each data set, right and wrong ones: whatever is wrong with them costs
    seconds now and a cluster later.

    An episode's function is imported and its signature is looked at. `tokenizer`: measures each prompt too, as the
    trainer will; `context`: tokens that model and server take, None where it is not known. Answers a line for each data
    set of which records are skipped or left out. `tell` is told of each what was read, measured and scored; `keep` gets
    the prompts of each. `tell_length` is told how many steps the run has, and how many checkpoints of
    `checkpoint_bytes` it keeps. Raises DataError and RewardImportError; of prompts ModelError and ConfigError too.
    """
    notes = []
    shown: Prompt | None = None
    prompts, size = 0, config.train_dataset.batch_size
    room = None if context is None else context - config.gconfig.max_new_tokens
    with _scorer(config) as pool:
        for key, dataset in config.datasets().items():
            records, bad = records_of(dataset, pool, key=key)
            score = None if pool is None else pool.of(records[0].dataset).check(records[0])
            longest, written, left_out = _measured(records, tokenizer, room, key, config, bad)
            shown = shown or next(iter(written), None)
            if keep is not None and tokenizer is not None:
                keep[key] = written
            count = len(written) if tokenizer is not None else len(records)
            if pool is not None and (config.reward.canaries is None or pool.of(records[0].dataset) is not pool):
                notes += [said] if (said := try_reward(records, pool, key=key)) else []
            tell(f"{key}: {counted(len(records), 'record')} read; {longest}; {_scored(config, pool, score)}")
            if key.startswith("train"):
                prompts += in_epoch(dataset.weight, count)
            if (tools := dataset.tools_key) is not None and not any(tools in one.record for one in records):
                notes.append(f"{key}.tools_key={tools}: no record has that field, so no prompt has tools")
            if left_out:
                notes.append(f"{key}: {counted(left_out, 'prompt')} left out, over {key}.max_length")
            read = (dataset.prompt_key, dataset.messages_key, dataset.answer_key, dataset.tools_key)
            notes += [said] if (said := media_note(records, key=key, read=read)) else []
            if bad.count:
                notes.append(f"{key}: {counted(bad.count, 'record')} skipped, such as {'; '.join(bad.examples)}")
        if pool is not None:
            asyncio.run(learn_given(read_given(config), pool, KeptScores()))
        else:
            asyncio.run(_import_episode(config))
    if tokenizer is not None and shown is not None and config.rollout.episode is None:  # an agent writes its own
        said = _shortened(tokenizer.decode(list(shown.token_ids)))
        tell(f"the first prompt of train_dataset, as the model gets it: {said!r}")
    _check_staleness(config, prompts)
    is_upper = tokenizer is None and any(
        one.max_length is not None for key, one in config.datasets().items() if key.startswith("train")
    )
    for line in length_lines(config, prompts, checkpoint_bytes=checkpoint_bytes, is_upper=is_upper):
        tell_length(line)
    if prompts < size:
        notes.append(f"train_dataset.batch_size={size}: no batch is full, as an epoch has {counted(prompts, 'prompt')}")
    return notes


def _measured(
    records: list[DataRecord],
    tokenizer: ChatTokenizer | None,
    room: int | None,
    key: str,
    config: RunConfig,
    bad: BadRecords,
) -> tuple[str, list[Prompt], int]:
    """What the longest prompt has, the prompts (none without a tokenizer), and how many more are over the data set's
    max_length. Raises DataError where one that isn't has no room."""
    if tokenizer is None:
        return "prompts were not measured, as tokenizer or chat template is missing here", [], 0
    longest = config.datasets()[key].max_length
    prompts, left_out = build_prompts(
        records, tokenizer, max_prompt_tokens=room, max_length=longest, key=key, chat=config.chat, bad=bad
    )
    tokens = max(len(one.token_ids) for one in prompts)
    return f"the longest prompt has {counted(tokens, 'token')}", prompts, left_out


def _shortened(text: str) -> str:
    """Its beginning and its end, where a template and a suffix have what is theirs."""
    more = len(text) - 2 * SHOWN_CHARS
    return text if more <= 0 else f"{text[:SHOWN_CHARS]} … ({more} characters more) … {text[-SHOWN_CHARS:]}"


def _scored(config: RunConfig, pool: RewardPool | None, score: float | None) -> str:
    if pool is None:
        return f"{config.rollout.episode} was not played"
    said = "no answer" if score is None else f"{score:g}"
    return f"the first answer, as it stands, is scored {said}"


def _check_staleness(config: RunConfig, prompts: int) -> None:
    """What is never reached is refused, as whoever set it means something else."""
    ahead, size = config.rollout.max_head_offpolicyness, config.train_dataset.batch_size
    if ahead and (ahead + 1) * size > prompts:
        raise DataError(
            f"rollout.max_head_offpolicyness={ahead} makes {ahead} batches ahead of the current one, which are "
            f"{(ahead + 1) * size} prompts of train_dataset.batch_size={size}, and an epoch has {prompts}",
            f"set it to {max(prompts // size - 1, 0)} at most",
        )


def _scorer(config: RunConfig) -> AbstractContextManager[RewardPool | None]:
    """None where the samples are episodes."""
    return nullcontext() if config.rollout.episode else RewardPool(config.reward, config.own_rewards())


async def _import_episode(config: RunConfig) -> None:
    """Raises RewardImportError where it can't be, and RewardError where no process can be started."""
    process = UserProcess(config.reward, episode=config.rollout.episode)
    try:
        await process.ready()
    finally:
        await process.close()


def records_of(dataset: DatasetConfig, pool: RewardPool | None, *, key: str) -> tuple[list[DataRecord], BadRecords]:
    """The records, without those that are skipped. `pool`: whose reward function says which answers it can compare
    with; None: not asked."""
    bad = BadRecords(dataset)
    records = load_records(dataset, key=key, bad=bad)
    scorer = None if pool is None else pool.of(records[0].dataset)
    problems = {} if scorer is None else scorer.find_bad_answers([record.answer for record in records])
    says = "" if scorer is None else f"{'reward.fn' if scorer is pool else 'reward_fn'}={scorer.fn}"
    for place, problem in problems.items():
        hint = (
            f"so says {says}: write the answer so, or name a function that takes it as it is; "
            f"{key}.answer_key names the column, {key}.bad_records=skip leaves such records out"
        )
        bad.add(DataError(f"{records[place].where}: {problem}", hint))
    if problems and len(problems) == len(records):
        raise DataError(f"{key}.path={dataset.path!r} holds no record that fits: {bad.examples[0]}", f"check {key}")
    return [record for place, record in enumerate(records) if place not in problems], bad
