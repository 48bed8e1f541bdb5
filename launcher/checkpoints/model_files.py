"""Checks that a model folder is complete, without torch and without reading the weights themselves.

SGLang takes 30 s of imports before it finds out that config.json is missing, and it serves nonsense for a folder in
which tensors are missing: so each is looked for here first, in milliseconds. NaN in the weights is not seen here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.base.errors import ModelError, UnsupportedModel
from launcher.checkpoints.manifest import inside
from launcher.checkpoints.model_shape import MODEL_TYPES, ModelShape
from launcher.checkpoints.tensor_files import read_entries
from launcher.config.data import unknown_template

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LAST_WRITTEN = "tokenizer_config.json"
"""Of an export by AReaL, which writes nothing atomically: an export without it was cut short."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""transformers holds the experts fused, under other names than the checkpoint, and nothing here maps them back."""
CHANGES = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
"""Settings of a config.json that trainer and server would not both follow."""
OTHER_WAY = "others by a trainer that takes them (AReaL, TRL), under this supervision: docs/adapters.md"


def read_shape(folder: Path) -> ModelShape:
    """The sizes from config.json. Raises ModelError: missing, not JSON, or of a kind that can't be trained here."""
    config = read_json(folder / "config.json")
    model_type = config.get("model_type")
    if problem := unsupported(config):
        what = f"{folder / 'config.json'}: model_type={model_type!r}: {problem}"
        raise UnsupportedModel(what, f"supported: {', '.join(MODEL_TYPES)}; {OTHER_WAY}")
    try:
        return ModelShape.of(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(
            f"{folder / 'config.json'} can't be used: {what}", "take the file that the model came with"
        ) from error


def unsupported(config: Mapping[str, Any]) -> str:
    """Why a model can't be trained here, by its kind; "" where it can."""
    kind = config.get("model_type")
    if kind in MODEL_TYPES:
        changes = [name for name in CHANGES if config.get(name)]
        turned, rope = config.get("partial_rotary_factor") or 1.0, config.get("rope_parameters") or {}
        if kind == "phi3" and rope.get("partial_rotary_factor", turned) != turned:  # SGLang 0.5.17 reads the other
            changes.append("partial_rotary_factor in rope_parameters alone")
        return f"a {kind} model with {' and '.join(changes)} is not supported" if changes else ""
    if config.get("vision_config"):
        return f"a {kind} model, which reads images, is not supported"
    if any(config.get(name) for name in EXPERTS):
        return f"a {kind} model, a mixture of experts, is not supported"
    return f"a {kind} model is not supported"


def refuse_own_code(folder: Path) -> None:
    """Raises ModelError where a model or a tokenizer asks for code from its own folder, or from the hub, to be run."""
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file() and read_json(folder / name).get("auto_map"):
            raise UnsupportedModel(
                f"{folder / name} names code to be run (auto_map)",
                "no code of a model is run here: take a model that transformers knows by itself",
            )


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Every shard complete, and every tensor of the architecture in one of them. Raises ModelError."""
    found = {name for shard in find_shards(folder) for name in read_entries(shard)}
    missing = [name for name in shape.tensors() if name not in found]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} tensors of config.json's model are in no file, e.g. {missing[0]}",
            "weights and config.json are of different models, or the export was cut short: copy the folder again",
        )


def check_tokenizer(folder: Path, *, needs_template: bool = True, template: str | None = None) -> None:
    """A tokenizer that can be loaded and has a chat template, that of the name `template` where one is given. Raises
    ModelError."""
    named = [*(folder / "additional_chat_templates").glob("*.jinja")]
    config = read_json(folder / "tokenizer_config.json")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(
            f"{folder} has no tokenizer.json (nor tokenizer.model, nor vocab.json)",
            "tokenizer_path names the folder of a tokenizer",
        )
    if (folder / "tokenizer.json").is_file():
        read_json(folder / "tokenizer.json")
    template_file = folder / "chat_template.jinja"
    has_file = template_file.is_file() and template_file.stat().st_size
    has_one = bool(config.get("chat_template") or named or has_file)
    if needs_template and not has_one:
        raise ModelError(
            f"the tokenizer in {folder} has no chat template, so that no prompt can be made of a question",
            "take an instruct model's tokenizer (tokenizer_path=…), put a chat_template.jinja into the folder, "
            "or set chat.template",
        )
    listed = config.get("chat_template")
    names = {path.stem for path in named}
    names |= {str(one["name"]) for one in listed} if isinstance(listed, list) else set()
    names |= {"default"} if named and template_file.is_file() else set()
    if template is not None and template not in names:
        raise ModelError(*unknown_template(template, sorted(names), tokenizer=str(folder)))


def check_vocabulary(folder: Path, shape: ModelShape) -> None:
    """No token that the model has no embedding for. Raises ModelError."""
    if not (folder / "tokenizer.json").is_file():
        return
    facts = read_json(folder / "tokenizer.json")
    try:
        vocabulary = facts["model"]["vocab"]  # token to id, or a list in the order of ids
        ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else range(len(vocabulary))
        largest = max([*ids, *(token["id"] for token in facts.get("added_tokens") or ())], default=0)
    except (KeyError, TypeError) as error:
        raise ModelError(
            f"{folder / 'tokenizer.json'} holds no vocabulary", "copy or download the file again"
        ) from error
    if largest >= shape.vocab:
        raise ModelError(
            f"the tokenizer in {folder} has a token {largest}, and the model only {shape.vocab} embeddings",
            "tokenizer and model are of different families: set tokenizer_path to the model's own",
        )


def find_shards(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises ModelError."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        named = index.get("weight_map")
        if not isinstance(named, dict) or not named:
            raise ModelError(f"{folder / INDEX} names no shard", "copy or download the file again")
        try:
            shards = [folder / inside(str(name)) for name in sorted(set(map(str, named.values())))]
        except ValueError as error:
            raise ModelError(f"{folder / INDEX}: {error}", "the weights must lie in the model's own folder") from error
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ModelError(
                f"{folder}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}",
                "copy or download the missing files",
            )
        return shards
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = sorted(file.name for file in [*folder.glob("*.bin"), *folder.glob("*.pt")])
    found = f" (there is {', '.join(others)}: a pickle, which can run code when loaded)" if others else ""
    raise ModelError(f"{folder} has no {SINGLE}{found}", "the weights must be safetensors")


def read_json(file: Path) -> Mapping[str, Any]:
    """The object in a JSON file. Raises ModelError."""
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing", "the folder is not a complete Hugging Face model") from error
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}", "check the path and its permissions") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}", "copy or download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}, not an object", "copy or download the file again")
    return value


def vocabulary_of(folder: Path) -> int | None:
    """How many tokens its config.json says that a model has; None where it says nothing of it. Raises ModelError."""
    size = read_json(folder / "config.json").get("vocab_size")
    return size if isinstance(size, int) else None
