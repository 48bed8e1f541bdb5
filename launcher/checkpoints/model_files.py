"""Is a model folder whole? Everything that can be known without torch and without reading the weights themselves.

SGLang takes 30 s of imports before it finds out that config.json is missing, and it serves nonsense for a folder in
which tensors are missing: so each is looked for here first, in milliseconds. NaN in the weights is not seen here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.errors import ModelError
from launcher.checkpoints.manifest import inside
from launcher.checkpoints.model_shape import MODEL_TYPES, ModelShape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors format


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """Names of the tensors in one file, and the file's length as its header says it."""

    names: frozenset[str]
    file_bytes: int


def read_shape(folder: Path) -> ModelShape:
    """The sizes from config.json. Raises ModelError: missing, not JSON, or of a kind that can't be trained here."""
    config = _read_json(folder / "config.json")
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ModelError(f"{folder / 'config.json'}: model_type={model_type!r}", f"supported: {', '.join(MODEL_TYPES)}")
    try:
        return ModelShape.of(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"{folder / 'config.json'} can't be used: {_what(error)}", "take the file that the model came with"
        ) from error


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Every shard there and of its full length, every tensor of the architecture in one of them. Raises ModelError."""
    there: set[str] = set()
    for file in find_shards(folder):
        header = read_header(file)
        actual = file.stat().st_size
        if actual != header.file_bytes:
            raise ModelError(
                f"{file} is {'truncated' if actual < header.file_bytes else 'damaged'}: "
                f"{actual} bytes instead of the {header.file_bytes} that its header names",
                "copy or download the file again",
            )
        there |= header.names
    missing = [name for name in tensor_names(shape) if name not in there]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} tensors of config.json's model are in no file, e.g. {missing[0]}",
            "weights and config.json are of different models, or the export was cut short: copy the folder again",
        )


def check_tokenizer(folder: Path) -> None:
    """A tokenizer that can be loaded and has a chat template. Raises ModelError."""
    config = _read_json(folder / "tokenizer_config.json")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(
            f"{folder} has no tokenizer.json (nor tokenizer.model, nor vocab.json)",
            "tokenizer_path names the folder of a tokenizer",
        )
    if (folder / "tokenizer.json").is_file():
        _read_json(folder / "tokenizer.json")
    template = folder / "chat_template.jinja"
    if not config.get("chat_template") and not (template.is_file() and template.stat().st_size):
        raise ModelError(
            f"the tokenizer in {folder} has no chat template, so that no prompt can be made of a question",
            "take an instruct model's tokenizer (tokenizer_path=…), or put a chat_template.jinja into the folder",
        )


def check_vocabulary(folder: Path, shape: ModelShape) -> None:
    """No token that the model has no embedding for. Raises ModelError."""
    if not (folder / "tokenizer.json").is_file():
        return
    facts = _read_json(folder / "tokenizer.json")
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


def tensor_names(shape: ModelShape) -> Iterator[str]:
    """The names under which transformers keeps the matrices and norms of these architectures."""
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    if not shape.tied:
        yield "lm_head.weight"
    for layer in range(shape.layers):
        for part in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{part}.weight"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"model.layers.{layer}.self_attn.{part}.weight"
        for part in ("gate_proj", "up_proj", "down_proj"):
            yield f"model.layers.{layer}.mlp.{part}.weight"


def read_header(file: Path) -> SafetensorsHeader:
    """The header of a safetensors file: 8 bytes of its length (little endian), then JSON. Raises ModelError."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            text = stream.read(length)
        tensors = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}", "check the path and its permissions") from error
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(
            f"{file} is not a whole safetensors file: {_what(error)}", "copy or download the file again"
        ) from error
    return SafetensorsHeader(names=frozenset(tensors), file_bytes=8 + length + end)


def find_shards(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises ModelError."""
    if (folder / INDEX).is_file():
        index = _read_json(folder / INDEX)
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


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing", "the folder is not a whole Hugging Face model") from error
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}", "check the path and its permissions") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}", "copy or download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}, not an object", "copy or download the file again")
    return value


def _what(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
