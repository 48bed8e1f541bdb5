"""Does this server hold these weights? `python -m scripts.check_weights --help`.

Greedy completions are asked of an SGLang server; the log-probs of their tokens are compared with those of the model in
a folder. Nothing is changed. From Python: `actors.weights.served_weights.check_weights`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import RequestFailed, UsageError
from launcher.reporting.terminal_text import SafeConsole
from scripts.checkpoints.arguments import Parser, seconds, server_url
from scripts.ending import ended, print_json

if TYPE_CHECKING:
    from actors.weights.served_weights import ServedWeights

EXIT_CODES = "0 the same weights; 1 other weights; 2 not known, a wrong command, or no valid answer of the server"
EXAMPLES = """

The server is asked by SGLang's own /generate, with token ids: no chat template matters. Adapters that it serves under
a name are not asked. Of our own runs the key is in keys/{user}/{experiment_name}/{trial_name}/api_key.

  python -m scripts.check_weights http://127.0.0.1:30000 /models/qwen
  python -m scripts.check_weights http://10.0.0.7:30000 …/epoch2epochstep9globalstep189 --api-key-file …/api_key
"""
REMEDIES = {
    "refused": "start the server, or give the address that it listens at: http://HOST:PORT",
    "timeout": "it hangs or is busy: look at its log, or give it longer with --timeout",
    "http_4xx": "give the address of an SGLang server (/generate), --api-key-file for its key, prompts that fit it",
    "http_5xx": "look at the server's log",
    "aborted": "new weights are being loaded: ask again afterwards",
    "malformed": "give the address of an SGLang server: its /generate is asked",
}
"""By the kind of what failed."""
CODES = {"same weights": 0, "other weights": 1, "unknown": 2}


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _check(parser().parse_args(arguments)))


def parser() -> argparse.ArgumentParser:
    made = Parser("check_weights", "Does this SGLang server hold these weights?", EXIT_CODES, examples=EXAMPLES)
    made.add_argument(
        "url", type=server_url, metavar="URL", help="the server's address, such as http://127.0.0.1:30000"
    )
    made.add_argument("folder", type=Path, metavar="MODEL_FOLDER", help="Hugging Face model folder, or a checkpoint")
    made.add_argument("--prompts", type=Path, metavar="FILE", help="texts, one a line, in place of random tokens")
    made.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens to ask for (default: %(default)s)")
    made.add_argument(
        "--dtype",
        default="",
        choices=("float32", "bfloat16", "float16"),
        help="number format that the server computes in; by default the server is asked",
    )
    made.add_argument(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where the folder's model computes (default: %(default)s)",
    )
    made.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the server's API key")
    made.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="S", help="deadline of each request (default: %(default)s)"
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def _check(given: argparse.Namespace) -> int:
    if not given.folder.is_dir():
        raise UsageError(f"there is no folder {given.folder}", "give the folder of a model, or of a checkpoint")
    if given.tokens < 1 or not given.timeout:
        raise UsageError("--tokens or --timeout is 0 or less", "e.g. --tokens 256 --timeout 60")
    key = "" if given.api_key_file is None else _read(given.api_key_file).strip()
    if given.api_key_file is not None and len(key.split()) != 1:
        raise UsageError(
            f"{given.api_key_file} does not hold one key and nothing else", "give a file with the key alone"
        )
    from actors.model.model_folder import load_tokenizer  # brings torch
    from actors.weights.served_weights import check_weights

    prompts = None
    if given.prompts is not None:
        texts = [line for line in _read(given.prompts).splitlines() if line.strip()]
        tokenizer = load_tokenizer(given.folder, key="MODEL_FOLDER")
        prompts = [ids for text in texts if (ids := tokenizer(text).input_ids)]
    try:
        found = check_weights(
            given.url,
            given.folder,
            prompts=prompts,
            tokens=given.tokens,
            dtype=given.dtype,
            device=given.device,
            api_key=key,
            timeout_s=given.timeout,
        )
    except RequestFailed as failure:
        raise UsageError(failure.message, REMEDIES.get(failure.kind, "look at the server's log")) from failure
    if given.json:
        facts = {"format": "grpo-served-weights/1", "url": given.url, "folder": str(given.folder)}
        print_json(facts | dataclasses.asdict(found))
    else:
        _show(given.url, given.folder, found)
    return CODES[found.verdict]


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror}", "give a file that this user may read") from error


def _show(url: str, folder: Path, found: ServedWeights) -> None:
    console = SafeConsole(soft_wrap=True)
    console.print(f"{found.verdict}: {url} and {folder}", markup=False, style="bold")
    console.print(f"  {found.reason}", markup=False)
    if found.tokens:
        noise, hidden = (f"about {100 * share:.1g} %" for share in (found.as_noise, found.hidden_noise))
        console.print(
            f"  log-probs of {found.tokens} greedy tokens are {found.distance:.2g} nats apart in the mean, as if every "
            f"weight had {noise} of noise; below {hidden} is not seen"
        )
        console.print(f"  the server's own label: weight_version {found.weight_version}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
