"""Reads AReaL's step line, `Train step … done.`, and the tables of its StatsLogger after it: figures by key.

    Epoch 1/2 Step 2/80 Train step 2/160 done.
    Stats (1/1):
    ╒═══…╤═══…╕
    │ ppo_actor/task_reward/avg │  1.1328e-01 │ ppo_actor/update/grad_norm │  1.0397e+00 │ …

Up to 0.4.0 there are N tables for a step, one for each minibatch, `Stats (i/N)`: a figure is the mean over those that
have it. In merged.log every line begins with `[role]`, with lines of other roles in between. Steps are counted from 1
in the log and from 0 here.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

END_OF_TABLE = "╘".encode()
BAR = "│".encode()
PAIR = re.compile(BAR + rb" (\S+) +" + BAR + rb" +(\S+) ")
STEP_WORDS = b"Train step "
STEP_LINE = re.compile(rb"(?:Step \d+/(?P<per_epoch>\d+) )?Train step (?P<step>\d+)/(?P<total>\d+) done\.")
OUR_STEP_LINE = re.compile(rb"trainer INFO: step (\d+): reward (\S+?),")
ANY_STEP_LINE = r"Train step \d+/\d+ done\.|trainer INFO: step \d+: reward "
"""Both, in RE2's grammar, to pick them out of a log (launcher/diagnosis/reading/line_reader.py)."""
COUNT = re.compile(rb"Stats \(\d+/(\d+)\):")
LONGEST = 4 * 2**20
"""Bytes from a step's line to the end of its last table, at most."""
SERVERS_AT = re.compile(rb"server launched at: (?:AREAL_LLM_SERVER_ADDRS=)?((?:(?:http://)?[\w.\[\]:-]+:\d+,?)+)")
"""One, by its own log, or all, by the launcher's."""
SERVER_START = re.compile(rb"python3 -m (areal\.[\w.]*launcher)\.\w+_server (.+?) (?:sglang\.random_seed|vllm\.seed)=")
"""The launcher gives its own arguments on to its servers, and a seed behind them."""
ENDS_BYTES = 2 * 2**20
"""Read of a log's beginning and of its end, for what is wanted at once."""
LOGS = ("trainer.log", "main.log", "merged.log", "actor.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """One step's figures. `global_step` counts from 0, as checkpoints and WandB do. `is_complete`: every table that
    was announced is there."""

    global_step: int
    total_steps: int
    values: dict[str, float]
    is_complete: bool


def read_step(data: bytes, start: int, end: int) -> StepTable | None:
    """The step whose line begins at `start`; its tables end before `end`. None where it is no step's line."""
    line_end = data.find(b"\n", start, end)
    line_end = end if line_end < 0 else line_end
    ours = OUR_STEP_LINE.search(data, start, line_end)
    if ours:
        values = {"rollout/reward": _number(ours[2])}
        return StepTable(global_step=int(ours[1]), total_steps=0, values=values, is_complete=True)
    found = STEP_LINE.search(data, start, line_end)
    if found is None:
        return None
    end = min(end, line_end + LONGEST)
    announced = COUNT.search(data, line_end, min(end, line_end + 65536))
    values, is_complete = _tables(data, line_end, end, int(announced[1]) if announced else 1)
    step, total = int(found["step"]) - 1, int(found["total"])
    return StepTable(global_step=step, total_steps=total, values=values, is_complete=is_complete)


def unfinished(data: bytes) -> int:
    """How many bytes at the end of some lines are of a step whose tables are not all there yet."""
    if (at := data.rfind(STEP_WORDS)) < 0:
        return 0
    start = data.rfind(b"\n", 0, at) + 1
    table = read_step(data, start, len(data))
    return 0 if table is None or table.is_complete else len(data) - start


def _tables(data: bytes, start: int, end: int, count: int) -> tuple[dict[str, float], bool]:
    seen: dict[str, list[float]] = defaultdict(list)
    stop = start
    for _ in range(count):
        position, stop = stop, data.find(END_OF_TABLE, stop + 1, end)
        rows = [row for row in data[position : end if stop < 0 else stop].split(b"\n") if BAR in row]
        for key, value in PAIR.findall(b"\n".join(rows)):
            seen[key.decode("utf-8", "replace")].append(_number(value))
        if stop < 0:
            break
    return {key: math.fsum(values) / len(values) for key, values in seen.items()}, stop >= 0


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def read_ends(log: Path) -> bytes:
    """A log's beginning and end, however long it is between them. Raises OSError."""
    with log.open("rb") as file:
        head = file.read(ENDS_BYTES)
        size = file.seek(0, 2)
        file.seek(max(size - ENDS_BYTES, len(head)))
        return head + b"\n" * (size > 2 * ENDS_BYTES) + file.read()


def log_of_steps(logs: Path) -> Path | None:
    """Which of its logs has the steps: the one that was written last, of those that there are."""
    found = [log for name in LOGS if (log := logs / name).is_file() and log.stat().st_size]
    return max(found, key=lambda log: log.stat().st_mtime, default=None)


def read_servers(logs: Path) -> list[str]:
    """URLs of the servers that were launched last, as the logs name them."""
    for log in (*(logs / name for name in LOGS), *sorted(logs.glob("*server*.log"))):
        try:
            found = SERVERS_AT.findall(read_ends(log))
        except OSError:
            continue
        several = [one for one in found if b"," in one]
        named = several[-1].split(b",") if several else list(dict.fromkeys(found))
        if named:
            return [f"http://{one.decode().removeprefix('http://')}" for one in named]
    return []


def launch_command(logs: Path) -> str:
    """What AReaL was started with, as its launcher shows it where it starts a server; "" where no log has that line."""
    for log in sorted(logs.glob("*.log")):
        try:
            found = SERVER_START.findall(read_ends(log))
        except OSError:
            continue
        if found:
            launcher, words = found[-1]
            return f"python3 -m {launcher.decode()}.local {words.decode('utf-8', 'replace')}"
    return ""


def read_steps_per_epoch(logs: Path) -> int | None:
    """From the first step in the log."""
    for name in LOGS:
        try:
            with (logs / name).open("rb") as lines:
                found = next(filter(None, map(STEP_LINE.search, lines)), None)
        except OSError:
            continue
        if found is not None and found["per_epoch"] is not None:
            return int(found["per_epoch"])
    return None
