"""The patterns of lines that matter, and what is read from such a line: AReaL's, SGLang's, torch's, the kernel's, ours.

One pattern of them all, in RE2's grammar, picks the lines (line_reader.py); the single ones then classify each.
AReaL's are of 0.3.0 to 1.0.4, SGLang's of 0.4 and 0.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.checkpoints.areal_log import ANY_STEP_LINE
from launcher.diagnosis.reading.log_records import Kind, LogEvent, Role
from launcher.policy import exit_cause
from launcher.policy.exit_cause import RanOut, find_server_cause, find_trainer_cause

KINDS: dict[Kind, str] = {
    Kind.REFUSED: r"ConnectionRefusedError|Connect call failed|Cannot connect to host|Connection refused",
    Kind.LOST: r"Connection reset by peer|ServerDisconnectedError|Server disconnected|ClientPayloadError",
    Kind.TIMEOUT: r"TimeoutError|ServerTimeoutError|ReadTimeout|Request timed out",
    Kind.REQUEST_FAILED: r"Failed after \d+ retries each",
    Kind.ROLLOUT_FAILED: r"Workflow execution failed|rollout failed",
    Kind.REWARD_TIMEOUT: r"Computing reward timeout",
    Kind.REWARD_ERROR: r"[Ee]rror (in|while|during) (computing )?(the )?reward|reward (function|fn) (raised|failed)"
    r"|Reward computation failed|in [a-z0-9_]*reward_fn\b",
    Kind.SERVER_LAUNCHED: r"server launched at",
    Kind.SERVER_READY: r"server is fired up and ready",
    Kind.SERVER_EXITED: r"exits, returncode=",
    Kind.SERVER_EXCEPTION: exit_cause.SERVER_CRASH.pattern,
    Kind.SERVER_WATCHDOG: r"[Ww]atchdog timeout|Watchdog caught collective operation timeout",
    Kind.SERVER_UNHEALTHY: r"[Hh]ealth check failed",
    Kind.OUT_OF_MEMORY: "|".join(
        pattern.pattern for pattern in (exit_cause.POOL_TOO_SMALL, exit_cause.POOL, exit_cause.DEVICE, exit_cause.HOST)
    ),
    Kind.KILLED_FOR_MEMORY: r"Killed process \d+ \(|oom-kill:constraint=|Detected \d+ oom[-_]kill event"
    r"|killed by the OOM killer|\bOOMKilled\b",
    Kind.KILLED: r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)",
    Kind.TRAINER_FAILED: r"ChildFailedError|Root Cause \(first observed failure\)|NCCL error|ncclUnhandled"
    r"|trainer process exited|Uncaught exception",
    Kind.CHECKPOINT: r"Saved recover checkpoint to |Dumped recover info|Saved (HF )?checkpoint|Saving checkpoint to",
    Kind.RECOVER_RUN: r"is_recover_run=True",
    Kind.RESUMED: r"Recovering from StepInfo|Load(ed|ing) recover (checkpoint|info)|recovered from",
}

ANY = "|".join([ANY_STEP_LINE, *KINDS.values()])

DATED = r"^.{0,80}?20\d\d-?[01]\d-?[0-3]\d[-T ][0-2]\d:[0-5]\d"
"""A line that is a record of its own, not a part of a traceback."""
REQUEST, GROUP = KINDS[Kind.REQUEST_FAILED], KINDS[Kind.ROLLOUT_FAILED]

ANSI = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
ROLE_PREFIX = re.compile(rb"^\[([A-Za-z][\w-]*)\]\s")

SERVER_ROLES = ("llm_server", "rollout", "sglang", "server", "inf_engine", "vllm")
"""Roles of merged.log, and parts of file names, that mean an inference server."""

MADE_TOKENS = b"#running-req: "
"""In SGLang's lines about a batch, Prefill and Decode alike, which show that it generates."""


HEAD = re.compile(
    r"^(\[[A-Za-z][\w-]*\]\s+)?(\(AReaL\) )?"
    r"(\[?20\d\d-?\d\d-?\d\d[-T ][\d:.,]+(Z| ?(UTC|GMT)| ?[+-]\d\d:?\d\d)?( [A-Z]{2}\d+)*\]?\s*)?"
    r"(trainer |StatsLogger )?"
)


KILL = re.compile(
    r"Killed process (?P<pid>\d+) \((?P<process>.*?)\)(?: |,|$)|\btask=(?P<task>[^,]+),pid=(?P<task_pid>\d+)"
    r"|exitcode\s*:\s*-9\s*\(pid: (?P<child>\d+)\)|received by PID (?P<receiver>\d+)"
)
OF_A_RUN = re.compile(r"python|pt_|ray|sglang|vllm|torchrun|gcs_server", re.IGNORECASE)
"""How the names of a run's processes begin, as the kernel writes them: 15 characters."""
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


def facts_of(kind: Kind, line: bytes, around: bytes) -> dict[str, object]:
    """The parts of a line, as far as its kind has any. `around`: the line with the traceback before it."""
    match kind:
        case Kind.SERVER_EXITED if found := EXIT.search(plain(line)):
            return {"exit_code": int(found["code"]), "url": found["url"] or ""}
        case Kind.CHECKPOINT if found := PATH.search(plain(line)):
            return {"path": found["path"]}
        case Kind.RESUMED if found := STEP_INFO.search(plain(line)):
            return {"global_step": int(found["step"])}
        case Kind.KILLED | Kind.KILLED_FOR_MEMORY:
            found = KILL.search(plain(line))
            pid, name = (found[found.lastgroup or 0], "") if found else ("", "")
            if found and kind is Kind.KILLED_FOR_MEMORY:
                pid, name = found["pid"] or found["task_pid"], found["process"] or found["task"]
            return {"pid": int(pid) if pid else None, "process": name}
        case Kind.OUT_OF_MEMORY:
            text = plain(line[:4096])
            return {"phase": phase_of(plain(around), text), "line": text[:600]}
    return {}


def phase_of(around: str, line: str) -> str:
    """startup, generation, training or transfer; "" where the lines around don't show it."""
    for phase in ("generation", "startup"):
        if PHASES[phase].search(line):
            return phase
    at = around.find(line) if line else -1
    before = around[:at] if at > 0 else around
    trace = before[max(before.rfind("Traceback (most recent call last)"), 0) :]
    last = {phase: max((m.start() for m in pattern.finditer(trace)), default=-1) for phase, pattern in PHASES.items()}
    if last["transfer"] >= 0:  # an update allocates within the model's own functions
        return "transfer"
    phase = max(last, key=lambda name: last[name])
    return phase if last[phase] >= 0 else ""


def without_head(text: str) -> str:
    """A line without its role, program and date, which are shown beside it."""
    return HEAD.sub("", text, count=1)


def plain(line: bytes) -> str:
    """A line as text, without colours."""
    return ANSI.sub(b"", line).decode("utf-8", "replace").strip()


# ── whose memory ran out, and in which phase ──


def place_of(event: LogEvent) -> tuple[str, str]:
    """(server or trainer, phase) of a line that reports that memory ran out; of a kill ("", "host") where the kernel's
    name for the process does not say which it was."""
    if event.kind is Kind.KILLED_FOR_MEMORY:
        return "" if event.role in (Role.UNKNOWN, Role.KERNEL) else str(event.role), "host"
    ran_out = str(event.facts.get("ran_out") or ran_out_of(event) or "")
    phases = {RanOut.SERVER_POOL_TOO_SMALL: "startup", RanOut.SERVER_POOL: "generation"}
    phase = next((phase for kind, phase in phases.items() if ran_out == kind), str(event.facts.get("phase") or ""))
    return "server" if ran_out.startswith("server") else "trainer", phase


def ran_out_of(event: LogEvent) -> RanOut | None:
    """Which memory it was, by the patterns of exit_cause.py."""
    if event.kind is Kind.KILLED_FOR_MEMORY:
        return {Role.SERVER: RanOut.SERVER_HOST, Role.TRAINER: RanOut.TRAINER_HOST}.get(event.role)
    line = str(event.facts.get("line") or event.text)
    known = event.facts.get("ran_out")
    if known in set(RanOut):
        return RanOut(str(known))
    find = find_server_cause if event.role is Role.SERVER else find_trainer_cause
    return find([line], None).ran_out or find_server_cause([line], None).ran_out
