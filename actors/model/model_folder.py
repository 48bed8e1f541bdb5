"""A Hugging Face model folder: read completely or refused, and written so that transformers and SGLang load it.

Transformers itself puts random numbers where a tensor is missing, and an empty tokenizer where there is none, each
with no more than a warning; here both are errors. Everything except the weights is carried over byte for byte: a
tokenizer that was read and written again need not cut text as it did.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from actors.model.stored_tensors import TensorRows, overwrite_tensors
from launcher.base.errors import ConfigError, ModelError
from launcher.checkpoints.manifest import WrittenPart
from launcher.checkpoints.model_files import OTHER_WAY, refuse_own_code, unsupported
from launcher.checkpoints.model_shape import MODEL_TYPES

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
SIDE_FILES = CONFIG_FILES + TOKENIZER_FILES


def local_folder(path: str, *, key: str) -> Path:
    """The folder that `path` names: itself, or the downloaded snapshot of a Hugging Face name. Raises ModelError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelError(f"there is no folder {path}", f"set {key} to a model folder or a Hugging Face name")
    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.safetensors.index.json", *SIDE_FILES]))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ModelError(
            f"{path} is no folder here, and could not be had from the Hugging Face hub: {_first_line(error)}",
            f"set {key} to a model folder, or to a hub name that this machine can reach or has in its cache",
        ) from error


def load_model(folder: Path, *, dtype: torch.dtype, attn_implementation: str, key: str) -> PreTrainedModel:
    """The causal language model in `folder`, every tensor of it from there. Raises ModelError, ConfigError."""
    hint = f"set {key} to a complete {', '.join(MODEL_TYPES)} model folder with safetensors weights"
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", hint)
    _refuse_own_code(folder, hint)
    try:
        model, missing = _load(folder, dtype, attn_implementation)
    except ImportError as error:
        raise ConfigError(
            f"actor.attn_implementation is {attn_implementation!r}: {_first_line(error)}",
            "set actor.attn_implementation=sdpa, or install what it needs",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{folder} could not be loaded: {_first_line(error)}", hint) from error
    if missing:
        raise ModelError(f"{folder} lacks the weights {', '.join(missing[:3])} ({len(missing)} in all)", hint)
    for name, weight in named_weights(model):
        if not weight.isfinite().all():
            raise ModelError(f"{folder} is damaged: {name} holds numbers that are not finite", hint)
    return model


def moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """`model` on `device`, in memory of its own. On the CPU transformers maps the files, and what is copied over them
    later would take the place of trained weights, silently; a file that gets shorter would end the process (SIGBUS)."""
    if device.type != "cpu":
        return model.to(device)  # type: ignore[arg-type, no-any-return]
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def _refuse_own_code(folder: Path, hint: str) -> None:
    try:
        refuse_own_code(folder)
    except ModelError as error:
        raise ModelError(error.message, f"{error.hint}, or {hint}") from error


def empty_model(folder: Path, *, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    """The model of `folder` without its weights, in memory that is not touched until they are set."""
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.from_pretrained(folder, trust_remote_code=False),
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=False,
        )
    model.tie_weights()
    return model


def _load(folder: Path, dtype: torch.dtype, attn_implementation: str) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of weights that transformers made up."""
    if problem := unsupported(AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()):
        raise ValueError(f"{problem}; {OTHER_WAY}")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=attn_implementation,
        use_safetensors=True,
        output_loading_info=True,
        trust_remote_code=False,
    )
    model, report = loaded
    return model, sorted(report["missing_keys"])


def load_tokenizer(folder: Path, *, key: str) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`. Raises ModelError."""
    hint = f"set {key} to a model folder with its tokenizer (tokenizer.json, tokenizer_config.json)"
    _refuse_own_code(folder, hint)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        raise ModelError(f"the tokenizer in {folder} could not be loaded: {_first_line(error)}", hint) from error
    wanted = tokenizer.vocab_files_names.values()
    if not any((folder / name).is_file() for name in wanted):
        raise ModelError(f"{folder} has no tokenizer: none of {', '.join(sorted(wanted))}", hint)
    return tokenizer


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers by their Hugging Face names, a tied tensor once, as `save_pretrained` stores them.

    They are the model's own.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def read_side_files(folder: Path, tokenizer_folder: Path) -> Mapping[str, bytes]:
    """The configuration in `folder`, and tokenizer and chat template in the other, to be there when these are not."""
    files = [
        *(file for pattern in CONFIG_FILES for file in folder.glob(pattern)),
        *(file for pattern in TOKENIZER_FILES for file in tokenizer_folder.glob(pattern)),
    ]
    return {file.name: file.read_bytes() for file in files if file.is_file()}


def write_side_files(folder: Path, side_files: Mapping[str, bytes], *, dtype: torch.dtype) -> None:
    """All of a model but its weights into the existing `folder`, its config saying their dtype. Raises OSError."""
    for name, content in side_files.items():
        (folder / name).write_bytes(_with_dtype(content, dtype) if name == "config.json" else content)


def write_weights(
    file: Path, pieces: Mapping[str, TensorRows], *, rank: int = 0, is_durable: bool = False
) -> WrittenPart:
    """This rank's part of a model's weights, for transformers and SGLang to load. `is_durable`: as of
    `overwrite_tensors`. Raises OSError."""
    return overwrite_tensors(file, pieces, rank=rank, notes={"format": "pt"}, is_durable=is_durable)


def _with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    facts: dict[str, Any] = json.loads(config)
    facts.pop("torch_dtype", None)  # the name before transformers 4.56; both at once would contradict
    facts["dtype"] = str(dtype).removeprefix("torch.")
    return json.dumps(facts, indent=2).encode()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
