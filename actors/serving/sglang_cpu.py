"""Runs the real SGLang server on the CPU: `python -m actors.serving.sglang_cpu <SGLang's own arguments>`.

HTTP server, scheduler, radix cache, detokenizer and weight updates are SGLang's own. This entry supplies what SGLang
lacks on a machine without CUDA, and makes it start in a fifth of the time and decode faster:

- `sgl_kernel` is replaced by an inert stand-in (`sgl_kernel_stand_in.py`); the arguments that a CPU needs are added.
- Packages that SGLang or transformers would import without need (`NEEDLESS`) are hidden.
- Of SGLang's 200 model files, only those that define the served architecture are imported.
- Decode attention is computed for all requests in one call (`batched_decode.py`).
- Scheduler and detokenizer are forked from this process, with everything imported, instead of spawned, while this
  process has a single thread.
- With `--orders` it is the host of an actor: it imports everything, and servers are forked of it (`ServerHost`).

Measured on two cores, 0.4 M parameters. From command to first token: 46 → 9 s of processor time, nearly all of it
imports; 42 → 10 s on the clock at load 3, 85 → 21 s at load 6. A generated token: 285 → 200 µs of the scheduler's
processor time with 128 requests at once, 515 → 340 µs with 32.

Never for a server on a GPU: `--device` other than cpu is refused, and GPUs are hidden from this process.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.processes.process_host import ORDERS, serve
from actors.serving import auth_middleware, sgl_kernel_stand_in

NEEDLESS = (
    "flashinfer",  # GPU kernels, with cutlass behind them
    "sklearn",  # transformers asks for it, for a way of speculative decoding; brings pandas, pyarrow and scipy.stats
)
"""Their users guard the import, and fall back to what a CPU takes anyway. pyarrow also starts a thread at import."""

CPU_ARGUMENTS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--disable-overlap-schedule": None,  # overlaps with a GPU's work; here it only costs
    "--sleep-on-idle": None,  # an idle scheduler otherwise takes a full core
}
NOISE = (
    "Triton is not supported on current platform",
    "Only CUDA, HIP and XPU support AWQ",
    "Only CUDA, MUSA and NPU support GGUF",
)


def prepare() -> None:
    """Make `import sglang` work in this process, and in spawned children, which import this module."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sgl_kernel_stand_in.install()
    for package in NEEDLESS:
        sys.modules[package] = None  # type: ignore[assignment]  # documented: importing it raises ModuleNotFoundError
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"


def sglang_folder() -> Path:
    """Of the installed one, which is not imported. Raises ModuleNotFoundError where there is none."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("sglang is not installed", name="sglang")
    return Path(found.origin).parent


def argument(arguments: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`; None where it isn't given."""
    for position, word in enumerate(arguments):
        if word == name:
            return arguments[position + 1] if position + 1 < len(arguments) else ""
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def with_cpu_arguments(arguments: Sequence[str]) -> list[str]:
    """`arguments` and what a CPU server needs beyond them. Exits with 2 where a GPU is asked for."""
    device = argument(arguments, "--device")
    if device not in (None, "cpu"):
        sys.exit(
            f"actors.serving.sglang_cpu serves on the CPU and was given --device {device}: "
            "use actors.serving.sglang_gpu"
        )
    added = [
        word for name, value in CPU_ARGUMENTS.items() if argument(arguments, name) is None for word in (name, value)
    ]
    return [*arguments, *(word for word in added if word is not None)]


def leave_out_other_models(model_path: str | None) -> None:
    """Make SGLang's registry skip every model file but those that define the architecture in `model_path`.

    An unreadable config.json or an unknown architecture changes nothing: SGLang reports what is wrong.
    """
    try:
        config = json.loads((Path(model_path or "") / "config.json").read_text())
        wanted = [f"class {architecture}(" for architecture in config["architectures"]]
    except (OSError, ValueError, KeyError, TypeError):
        return
    files = list((sglang_folder() / "srt" / "models").glob("*.py"))
    needed = {file for file in files if any(name in file.read_text() for name in wanted)}
    if needed:
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(f.stem for f in files if f not in needed))


def fork_children() -> None:
    """Let SGLang's `set_start_method("spawn")` choose fork, where that is safe: with no thread but this one.

    A fork of a process with threads may inherit a lock that nobody holds any more.
    """
    set_start_method = multiprocessing.set_start_method

    def choose(method: str | None, force: bool = False) -> None:
        single_threaded = len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208 - only their number is wanted
        set_start_method("fork" if single_threaded else method, force=force)

    multiprocessing.set_start_method = choose


def keep_the_rendezvous_private(server_args: Any) -> None:
    """Let the ranks of one machine meet in a private file: torch's TCPStore listens on every interface, for anybody."""
    if server_args.nnodes == server_args.dp_size == 1:
        meeting = f"file://{tempfile.mkdtemp(prefix='ranks-')}/store"
        os.environ.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", meeting)


def import_sglang(model_path: str | None) -> None:
    """All that a server of that model needs, and its children too, which are forked of it."""
    leave_out_other_models(model_path)
    gc.disable()  # nothing to collect while importing, and looking for it took a quarter of the time
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.models.registry
    import sglang.srt.server_args  # noqa: F401

    from actors.serving import batched_decode  # torch

    batched_decode.install()
    gc.freeze()
    gc.enable()


def be_forked(words: Sequence[str]) -> list[str]:
    """Import all, and fork servers from then on; returns in each, with its arguments (process_host.py)."""
    command = serve(words, preload=lambda: import_sglang(argument(words, "--model-path")))
    from sglang.srt.model_loader import weight_utils

    weight_utils.temp_dir = tempfile.gettempdir()  # read at import: the host's
    return command[command.index(__spec__.name) + 1 :]


def main() -> None:
    """Serve until asked to stop. `sys.argv` holds SGLang's arguments, or the host's."""
    if ORDERS in sys.argv:
        sys.argv[1:] = be_forked(sys.argv)
    arguments = with_cpu_arguments(sys.argv[1:])
    auth_middleware.keys_or_exit()
    import_sglang(argument(arguments, "--model-path"))
    import sglang.srt.entrypoints.http_server as http
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(arguments)
    auth_middleware.refuse_bypasses(server_args)
    auth_middleware.protect(http.app)
    keep_the_rendezvous_private(server_args)
    fork_children()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):
    prepare()

if __name__ == "__main__":
    main()
