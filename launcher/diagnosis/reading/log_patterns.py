"""The words by which logs tell what happened: AReaL's, SGLang's, torch's, the kernel's and our own, in RE2's grammar.

One pattern of them all picks the lines that matter (line_reader.py); the single ones then say what each is. AReaL's are
of 0.3.0 to 1.0.4, SGLang's of 0.4 and 0.5.
"""

from __future__ import annotations

import re

from launcher.diagnosis.reading.log_records import Kind
from launcher.policy import exit_cause

STEP = r"Train step \d+/\d+ done\.|trainer INFO: step \d+: reward "
"""The line after which a step's table stands, and the line of our own trainer.log."""

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
    Kind.KILLED_FOR_MEMORY: r"oom-kill|oom_kill|Out of memory: Killed process|exitcode\s*:\s*-9|Signal 9 \(SIGKILL\)",
    Kind.TRAINER_FAILED: r"ChildFailedError|Root Cause \(first observed failure\)|NCCL error|ncclUnhandled"
    r"|trainer process exited|Uncaught exception",
    Kind.CHECKPOINT: r"Saved recover checkpoint to |Dumped recover info|Saved (HF )?checkpoint|Saving checkpoint to",
    Kind.RECOVER_RUN: r"is_recover_run=True",
    Kind.RESUMED: r"Recovering from StepInfo|Load(ed|ing) recover (checkpoint|info)|recovered from",
}

ANY = "|".join([STEP, *KINDS.values()])

ANSI = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
STAMP = re.compile(rb"(20\d\d)-?([01]\d)-?([0-3]\d)[-T ]([0-2]\d):([0-5]\d):([0-6]\d)(?:[.,](\d{1,6}))?")
ROLE_PREFIX = re.compile(rb"^\[([A-Za-z][\w-]*)\]\s")

SERVER_ROLES = ("llm_server", "rollout", "sglang", "server", "inf_engine", "vllm")
"""Roles of merged.log, and parts of file names, that mean an inference server."""

MADE_TOKENS = b"#running-req: "
"""In SGLang's lines about a batch, Prefill and Decode alike, which prove that it generates."""


HEAD = re.compile(
    r"^(\[[A-Za-z][\w-]*\]\s+)?(\(AReaL\) )?"
    r"(\[?20\d\d-?\d\d-?\d\d[-T ][\d:.,]+( [A-Z]{2}\d+)*\]?\s*)?(trainer |StatsLogger )?"
)


def without_head(text: str) -> str:
    """A line without its role, program and date, which are told beside it."""
    return HEAD.sub("", text, count=1)


def plain(line: bytes) -> str:
    """A line as text, without colours."""
    return ANSI.sub(b"", line).decode("utf-8", "replace").strip()
