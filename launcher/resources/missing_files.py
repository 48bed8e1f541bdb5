"""Checks that the files a run needs exist: models, tokenizer, data sets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.base.errors import DataError, EmptyData, ModelError, UnsupportedSetting, UsageError
from launcher.checkpoints import model_files
from launcher.checkpoints.model_shape import ModelShape, known_shape
from launcher.config.data import DATA_ENDINGS, NO_TEMPLATE, data_ending
from launcher.config.schema import RunConfig
from launcher.resources import hub


def find_shape(config: RunConfig) -> ModelShape | None:
    """The model's sizes from its files, or of a well-known model by its name; None where neither is known."""
    folder = model_folder(config.actor.path)
    return known_shape(config.actor.path) if folder is None else _shape_of(folder)


def _shape_of(folder: Path) -> ModelShape | None:
    try:
        return model_files.read_shape(folder)
    except ModelError:  # reported by the check of the model itself
        return None


def model_folder(path_or_name: str) -> Path | None:
    """A local folder, or the cached one of a hub name; None where nothing of it is on this machine."""
    if path_or_name and Path(path_or_name).is_dir():  # an empty one would be the folder of the command
        return Path(path_or_name)
    return hub.cached_model(path_or_name) if hub.is_hub_name(path_or_name) else None


def missing_models(config: RunConfig, shape: ModelShape | None) -> Iterator[UsageError]:
    """Each model and the tokenizer: there, complete, and of sizes that the settings agree with."""
    models = {"actor.path": config.actor.path, "sglang.model_path": config.sglang.model_path}
    if config.actor.needs_reference:
        models["ref.path"] = config.ref.path
    problems: dict[str, UsageError] = {}  # a tokenizer in a model's folder has some of that model's: each is told once
    found = [(keys, _missing_model(path, keys, _check_model)) for path, keys in _keys_by_path(models).items()]
    is_reported = config.tokenizer_path in models.values() and model_folder(config.tokenizer_path) is None
    if not is_reported:
        check = _tokenizer_check(config)
        found.append(("tokenizer_path", _missing_model(config.tokenizer_path, "tokenizer_path", check)))
    for keys, those in found:
        for one in those:
            problems.setdefault(one.message, _naming(keys, one))
    yield from problems.values()
    if shape is not None:
        yield from _sizes_disagree(config, shape)
        yield from _models_disagree(config, shape)


def _naming(keys: str, problem: UsageError) -> UsageError:
    """What a folder lacks is found by its files alone, which know no setting."""
    if keys in problem.message:
        return problem
    return type(problem)(f"{keys}: {problem.message}", problem.hint)


def _keys_by_path(paths: dict[str, str]) -> dict[str, str]:
    """Each path once, with the settings that name it."""
    return {
        path: " and ".join(key for key, of in paths.items() if of == path) for path in dict.fromkeys(paths.values())
    }


def _missing_model(path: str, keys: str, check: Callable[[Path], None]) -> Iterator[UsageError]:
    folder = model_folder(path)
    found = [] if folder is None else list(_problems(check, folder))
    if folder is not None and (not found or Path(path).is_dir()):
        yield from found
    elif path and Path(path).exists():
        yield ModelError(f"the model {keys}={path} is a file", "name the Hugging Face folder that holds it")
    elif not hub.is_hub_name(path):
        yield ModelError(f"the model {keys}={path} does not exist", "name a Hugging Face folder, or a model of the hub")
    elif (reason := hub.why_unavailable(path, kind="model")) and found:
        yield from (type(one)(f"{one.message}, and not had from the hub: {reason}", one.hint) for one in found)
    elif reason:
        yield ModelError(
            f"the model {keys}={path} is not on this machine: not in the Hugging Face cache, and {reason}",
            f"with network: hf download {path}, into the folder that HF_HOME names; without: copy its folder here and "
            "set actor.path to it",
        )


def _problems(check: Callable[[Path], None], folder: Path) -> Iterator[UsageError]:
    try:
        model_files.refuse_own_code(folder)
        check(folder)
    except ModelError as error:
        yield error


def _tokenizer_check(config: RunConfig) -> Callable[[Path], None]:
    """With a chat template where no other is given, and with the one that is named."""
    template = config.chat.template
    is_given = template == NO_TEMPLATE or (template is not None and Path(template).is_file())
    name = None if is_given else template
    return functools.partial(model_files.check_tokenizer, needs_template=not is_given, template=name)


def _check_model(folder: Path) -> None:
    model_files.check_weights(folder, model_files.read_shape(folder))


def _sizes_disagree(config: RunConfig, shape: ModelShape) -> Iterator[UsageError]:
    longest = (config.train_dataset.max_length or 1) + config.gconfig.max_new_tokens
    for key, tokens in (("sglang.context_length", config.sglang.context_length), ("gconfig.max_new_tokens", longest)):
        if tokens is not None and tokens > shape.positions:
            yield UnsupportedSetting(
                f"{key}: sequences of {tokens} tokens, but {config.actor.path} takes {shape.positions}",
                f"at most {shape.positions} for prompt and completion together (why so few: docs/recipes.md)",
            )
    if strange := sorted(set(config.actor.target_modules) - shape.matrices.keys()):
        yield UnsupportedSetting(
            f"actor.target_modules: {config.actor.path} has no {', '.join(strange)}",
            f"choose of {', '.join(shape.matrices)}",
        )
    adapted = [min(size) for name, size in shape.matrices.items() if name in config.actor.adapted]
    rank, most = config.actor.lora_rank, max(adapted, default=config.actor.lora_rank)
    if config.actor.use_lora and rank > most:
        yield UnsupportedSetting(
            f"actor.lora_rank={rank}: of the matrices of {config.actor.path} that get an adapter none has a larger "
            f"rank than {most} itself",
            f"at most {most}; or actor.use_lora=false, which trains all weights",
        )
    tp = config.sglang.tp_size
    heads = f"{shape.heads} heads and {shape.kv_heads} KV heads"
    if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
        yield UnsupportedSetting(
            f"sglang.tp_size={tp} does not divide the {heads} of {config.actor.path}", "choose a tp_size that does"
        )


def _models_disagree(config: RunConfig, shape: ModelShape) -> Iterator[UsageError]:
    """The server gets the trainer's weights, and the trainer the tokenizer's tokens: they must be of one shape."""
    server, tokenizer = model_folder(config.sglang.model_path), model_folder(config.tokenizer_path)
    if server is not None and config.sglang.model_path != config.actor.path and _shape_of(server) not in (None, shape):
        yield UnsupportedSetting(
            f"sglang.model_path={server} is of another shape than actor.path={config.actor.path}",
            "leave sglang.model_path out: it follows actor.path",
        )
    if tokenizer is not None and not list(_problems(_tokenizer_check(config), tokenizer)):
        for one in _problems(lambda folder: model_files.check_vocabulary(folder, shape), tokenizer):
            yield _naming("tokenizer_path", one)


def missing_data(config: RunConfig) -> Iterator[UsageError]:
    """Each data set: there, and not empty."""
    paths = {f"{key}.path": dataset.path for key, dataset in config.datasets().items()}
    for path, keys in _keys_by_path(paths).items():
        yield from _missing_dataset(path, keys)


def _missing_dataset(path: str, keys: str) -> Iterator[UsageError]:
    if path and Path(path).exists():
        if not _data_files(Path(path)):
            yield EmptyData(
                f"{keys}={path} holds no records", f"give a file that is not empty, of {', '.join(DATA_ENDINGS)}"
            )
    elif not hub.is_hub_name(path):
        yield DataError(f"the data set {keys}={path} does not exist", "name a file, a folder, or a data set of the hub")
    elif refusal := hub.why_not_kept("dataset"):
        yield DataError(
            f"the data set {keys}={path} can't be read: {refusal}",
            "`datasets` locks it there whenever it reads: set HF_HOME (or HF_DATASETS_CACHE) to a folder that may be "
            "written, or give a .parquet or .jsonl file of it",
        )
    elif not hub.is_cached_dataset(path) and (reason := hub.why_unavailable(path, kind="dataset")):
        yield DataError(
            f"the data set {keys}={path} is not on this machine: not in the cache of `datasets`, and {reason}",
            "copy the cache from where there is network, or give a .parquet or .jsonl file of it",
        )


def _data_files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if data_ending(file)]
    return [file for file in files if file.stat().st_size]
