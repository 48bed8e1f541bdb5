"""What a line says in parts: exit codes, paths, steps, and where memory ran out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from launcher.diagnosis.reading.line_reader import LineBlock
from launcher.diagnosis.reading.log_patterns import plain
from launcher.diagnosis.reading.log_records import Kind

BEFORE_BYTES, AFTER_BYTES = 24 * 1024, 2 * 1024
"""Of an out-of-memory line: its traceback, which says what was being done."""

EXIT = re.compile(r"(?P<url>https?://\S+|\d+\.\d+\.\d+\.\d+:\d+)?\s*exits, returncode=(?P<code>-?\d+)")
PATH = re.compile(r"(?:to|checkpoint|info) (?P<path>/\S+)")
STEP_INFO = re.compile(r"global_step=(?P<step>\d+)")

PHASES: Mapping[str, re.Pattern[str]] = {
    "transfer": re.compile(
        r"update_weights|upload_weights|_update_weights_from|load_weights|init_weights_update_group|broadcast_weights"
        r"|update_weight|pause_generation"
    ),
    "startup": re.compile(
        r"init_memory_pool|capture_cuda_graph|cuda_graph_runner|CudaGraphRunner|Capture cuda graph|in __init__"
        r"|load_model|from_pretrained|increase --mem-fraction-static|create_optimizer|initialize_model|init_process"
    ),
    "training": re.compile(
        r"\.backward\(|in backward|train_batch|ppo_update|forward_backward|optimizer\.step|compute_logp|train_step"
        r"|compute_advantages|loss_fn|in step\b"
    ),
    "generation": re.compile(
        r"event_loop|forward_batch_generation|forward_decode|forward_extend|run_batch|(Prefill|Decode) out of memory"
        r"|get_next_batch_to_run|sample\("
    ),
}
"""What was being done when memory ran out, by the functions of its traceback; the last one named counts."""


def facts_of(kind: Kind, block: LineBlock, number: int) -> dict[str, object]:
    """The parts of line `number` of a block, as far as its kind has any."""
    read = _FACTS.get(kind)
    return {} if read is None else read(block, number)


def _exit_facts(block: LineBlock, number: int) -> dict[str, object]:
    match = EXIT.search(plain(block.line(number)))
    return {} if match is None else {"exit_code": int(match["code"]), "url": match["url"] or ""}


def _checkpoint_facts(block: LineBlock, number: int) -> dict[str, object]:
    match = PATH.search(plain(block.line(number)))
    return {} if match is None else {"path": match["path"]}


def _resume_facts(block: LineBlock, number: int) -> dict[str, object]:
    match = STEP_INFO.search(plain(block.line(number)))
    return {} if match is None else {"global_step": int(match["step"])}


def _memory_facts(block: LineBlock, number: int) -> dict[str, object]:
    start, end = int(block.starts[number]), int(block.ends[number])
    around = plain(block.data[max(0, start - BEFORE_BYTES) : end + AFTER_BYTES])
    line = plain(block.line(number)[:4096])
    return {"phase": phase_of(around, line), "line": line[:600]}


def phase_of(around: str, line: str) -> str:
    """startup, generation, training or transfer; "" where the lines around don't say."""
    for phase in ("generation", "startup"):
        if PHASES[phase].search(line):
            return phase
    at = around.find(line) if line else -1
    before = around[:at] if at > 0 else around
    trace = before[before.rfind("Traceback (most recent call last)") :] if "Traceback (most" in before else before
    last = {phase: max((m.start() for m in pattern.finditer(trace)), default=-1) for phase, pattern in PHASES.items()}
    if last["transfer"] >= 0:  # an update allocates within the model's own functions
        return "transfer"
    phase = max(last, key=lambda name: last[name])
    return phase if last[phase] >= 0 else ""


_FACTS: Mapping[Kind, Callable[[LineBlock, int], dict[str, object]]] = {
    Kind.SERVER_EXITED: _exit_facts,
    Kind.CHECKPOINT: _checkpoint_facts,
    Kind.RESUMED: _resume_facts,
    Kind.OUT_OF_MEMORY: _memory_facts,
}
