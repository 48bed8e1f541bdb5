"""Says what of our use of SGLang is missing in a version of it, from its source: nothing of it is imported or run.

    python -m scripts.sglang_contract [PATH]

PATH: a wheel, or the package's folder (default: the installed one). What is there under the same name may still behave
otherwise; after an upgrade the tests with the real server decide (docs/supervision.md).
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from rich.table import Table

from actors.serving import sglang_cpu
from actors.serving.server_processes import TITLES, TOKENS
from actors.serving.sglang_client import CONFIGURED
from actors.serving.sglang_command import command
from actors.serving.sglang_cpu import sglang_folder
from launcher.base.errors import UsageError
from launcher.config.schema import SGLangConfig
from launcher.reporting.terminal_text import SafeConsole
from launcher.resources.sglang_arguments import BYPASSES
from scripts.checkpoints.arguments import Parser
from scripts.ending import DONE, ended
from scripts.health.server_check import KV_USE, QUEUED, RUNNING

Sources = Mapping[str, str]
"""The package's Python files by their path in it, `srt/server_args.py`."""

REQUESTS = "srt/managers/io_struct.py"
ROUTES = "srt/entrypoints/http_server.py"
STREAMER = "srt/managers/scheduler_components/output_streamer.py"
BY_LENGTH = "% stream_interval == 0"
"""A part is sent where a completion's length is a multiple of a negative interval."""
ARGUMENTS = r"srt/(server_args|arg_groups/.*)\.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """`name` of a `kind` in the files that match `files`; of a text one of those between bars. `use`: our module that
    needs it."""

    kind: str
    name: str
    files: str
    use: str


def needs() -> Iterator[Need]:
    """What our modules ask of SGLang. Names come from these modules wherever they are written there."""
    for name, files in (
        ("run_server", r"launch_server\.py"),
        ("prepare_server_args", r"srt/server_args\.py"),
        ("kill_process_tree", r"srt/utils/.*\.py"),
        ("load_plugins", r"srt/plugins/__init__\.py"),
    ):
        yield Need(kind="function", name=name, files=files, use="actors/serving/sglang_gpu.py")
    yield Need(
        kind="method",
        name="TorchNativeAttnBackend._run_sdpa_forward_decode(query, output, k_cache, v_cache, req_to_token, "
        "req_pool_indices, seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size)",
        files=r"srt/layers/attention/torch_native_backend\.py",
        use="actors/serving/batched_decode.py",
    )
    for name in sorted({*_our_arguments(), *(word.removeprefix("--") for word in sglang_cpu.CPU_ARGUMENTS)}):
        yield Need(
            kind="argument", name=name.replace("-", "_"), files=ARGUMENTS, use="actors/serving/sglang_command.py"
        )
    for name in BYPASSES:  # one of another name would no longer be refused
        yield Need(kind="argument", name=name, files=ARGUMENTS, use="actors/serving/auth_middleware.py")
    for path in ("/generate", "/model_info", "/health", "/flush_cache", "/abort_request"):
        yield Need(kind="route", name=path, files=ROUTES, use="actors/serving/sglang_client.py")
    for path, request, given in (
        ("/update_weights_from_disk", "UpdateWeightFromDiskReqInput", ("model_path",)),
        ("/update_weights_from_tensor", "UpdateWeightsFromTensorReqInput", ("serialized_named_tensors", "load_format")),
        (
            "/update_weights_from_distributed",
            "UpdateWeightsFromDistributedReqInput",
            ("names", "dtypes", "shapes", "group_name", "load_format"),
        ),
    ):
        yield Need(kind="route", name=path, files=ROUTES, use="actors/serving/sglang_client.py")
        for name in (*given, "weight_version", "abort_all_requests", "flush_cache"):
            yield Need(kind="field", name=f"{request}.{name}", files=REQUESTS, use="actors/serving/sglang_client.py")
    path = "/init_weights_update_group"
    yield Need(kind="route", name=path, files=ROUTES, use="actors/serving/sglang_client.py")
    for name in ("group_name", "master_address", "master_port", "backend", "rank_offset", "world_size"):
        request = f"InitWeightsUpdateGroupReqInput.{name}"
        yield Need(kind="field", name=request, files=REQUESTS, use="actors/serving/sglang_client.py")
    yield Need(kind="text", name='"flattened_bucket"', files=r"srt/.*\.py", use="actors/serving/weight_buckets.py")
    for name in ("input_ids", "sampling_params", "return_logprob", "stream"):
        yield Need(kind="field", name=f"GenerateReqInput.{name}", files=REQUESTS, use="actors/serving/sglang_client.py")
    for name in (*CONFIGURED, "stop_token_ids", "sampling_seed", "stream_interval"):
        yield Need(
            kind="field",
            name=f"SamplingParams.{name}",
            files=r"srt/sampling/sampling_params\.py",
            use="actors/serving/sglang_client.py",
        )
    yield Need(kind="text", name=BY_LENGTH, files=STREAMER, use="actors/serving/sglang_client.py")
    for name in ("output_token_logprobs", "completion_tokens", "finish_reason", "weight_version", "output_ids"):
        yield Need(kind="text", name=f'"{name}"', files=r"srt/managers/.*\.py", use="actors/serving/completions.py")
    for name in ("SGLANG_USE_CPU_ENGINE", "SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"):
        yield Need(kind="text", name=name, files=r"srt/.*\.py", use="actors/serving/sglang_cpu.py")
    for name in TITLES:
        yield Need(kind="text", name=name, files=r"srt/managers/.*\.py", use="actors/serving/server_processes.py")
    for name in (TOKENS, RUNNING, QUEUED, KV_USE):
        yield Need(
            kind="text", name=f'"{name}"', files=r"srt/observability/.*\.py", use="scripts/health/server_check.py"
        )


def _our_arguments() -> Iterator[str]:
    """The options of the longest command line that we build."""
    config = SGLangConfig()
    for one in fields(config):
        if (given := getattr(config, one.name)) is None or str(given).startswith("${"):
            setattr(config, one.name, 1)
    words = command(
        config,
        entry=(),
        device="cuda",
        index=0,
        generation=0,
        model_path="model",
        weight_version=0,
        port=1,
    )
    return (word.removeprefix("--") for word in words if word.startswith("--"))


def missing(sources: Sources) -> list[Need]:
    """Of what we need, what no file of `sources` has."""
    names = cache(lambda path: frozenset(_defined(ast.parse(sources[path]))))

    def has(path: str, need: Need) -> bool:
        match need.kind:
            case "text":
                return any(name in sources[path] for name in need.name.split(" | "))
            case "route":
                return re.search(rf'@app\.\w+\(\s*"{re.escape(need.name)}"', sources[path]) is not None
            case "argument":
                flag = f'"--{need.name.replace("_", "-")}"'
                return flag in sources[path] or any(name.endswith(f".{need.name}") for name in names(path))
        return need.name in names(path)

    return [need for need in needs() if not any(has(path, need) for path in sources if re.fullmatch(need.files, path))]


def _defined(tree: ast.Module) -> Iterator[str]:
    """`function`, `Class.method(its, parameters)`, `Class.field` of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        if not isinstance(node, ast.ClassDef):
            continue
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef):
                yield f"{node.name}.{inner.name}({', '.join(one.arg for one in inner.args.args[1:])})"
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                yield f"{node.name}.{inner.target.id}"


def read_sources(path: Path) -> Sources:
    """Raises UsageError where `path` is neither a wheel nor a folder of SGLang."""
    if path.is_dir():
        found = {str(file.relative_to(path)): file for file in path.glob("**/*.py")}
        sources = {name: file.read_text(encoding="utf-8-sig") for name, file in found.items() if _is_of_use(name)}
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("sglang/") and name.endswith(".py")]
            short = {name: name.removeprefix("sglang/") for name in names}
            sources = {short[name]: wheel.read(name).decode("utf-8-sig") for name in names if _is_of_use(short[name])}
    else:
        raise UsageError(f"{path} is neither a wheel nor a folder", "give SGLang's wheel, or its folder `sglang`")
    if "srt/server_args.py" not in sources:
        raise UsageError(f"{path} has no srt/server_args.py", "give SGLang's wheel, or its folder `sglang`")
    return sources


def _is_of_use(name: str) -> bool:
    return name == "launch_server.py" or name.startswith("srt/")


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "sglang_contract",
        "What of our use of SGLang is missing in a version of it, from its source.",
        "0 all is there; 1 something is missing; 2 PATH is no SGLang",
    )
    made.add_argument(
        "path", nargs="?", type=Path, help="a wheel, or the package's folder (default: the installed one)"
    )
    return made


def main(arguments: list[str] | None = None) -> int:
    return ended(lambda: _look(parser().parse_args(arguments).path))


def _look(path: Path | None) -> int:
    try:
        gone = missing(read_sources(path or sglang_folder()))
    except ModuleNotFoundError as error:
        raise UsageError("SGLang is not installed", "give the path of a wheel") from error
    if gone:
        table = Table("what", "name", "looked for in", "used by")
        for need in gone:
            table.add_row(need.kind, need.name, need.files, need.use)
        SafeConsole().print(table)
    print(f"{len(list(needs()))} names asked for, {len(gone)} missing")
    return 1 if gone else DONE


if __name__ == "__main__":
    sys.exit(main())
