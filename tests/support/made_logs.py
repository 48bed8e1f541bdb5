"""Logs as AReaL and SGLang write them, made up: of a run that is healthy, or that fails at a known step in a known way.

For the tests of scripts/diagnose.py, which know the right answer. The formats were read from real logs (one is in
tests/unit/data/).
"""

from __future__ import annotations

import calendar
import heapq
import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

BEGIN = calendar.timegm((2025, 11, 11, 9, 0, 0))
GREEN, BROWN, RESET = "\x1b[92m", "\x1b[1;38;2;180;140;80m", "\x1b[0m"
PAIRS_A_ROW = 4
MORE_KEYS = tuple(
    f"update/{name}/{part}"
    for name in ("importance_weight", "clip_ratio", "new_logp", "old_logp", "behave_kl", "max_logits", "dual_clip")
    for part in ("avg", "min", "max")
)
ADDRESS = "127.0.0.1:30000"

FAILURES = (
    "crash",
    "hang",
    "server_oom",
    "startup_oom",
    "trainer_oom",
    "transfer_oom",
    "degradation",
    "reward_function",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A run. `fails` at the step `onset` (from 0) in one of the ways of FAILURES, "" never. `old`: as 0.4.0 and before,
    other keys, no prefix, `minibatches` tables a step. `plain`: no colours. `groups`: rollouts that fail in each step.
    `chatter`: meaningless lines of each step. `recovers_at`: steps, after which it continues from `back_to`."""

    fails: str = ""
    onset: int = 60
    steps: int = 120
    seed: int = 1
    old: bool = False
    minibatches: int = 1
    plain: bool = False
    groups: int = 8
    payload_tokens: int = 200
    chatter: int = 2
    recovers_at: int | None = None
    back_to: int | None = None
    step_s: float = 60.0
    rewards: Mapping[int, float] = field(default_factory=dict)


class RunMaker:
    """Writes the lines of one made run, trainer's and server's, with one clock."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self._random = random.Random(made.seed)
        self.now = float(BEGIN)
        self.is_mended = False
        self._payloads = [
            ", ".join(str(self._random.randrange(150_000)) for _ in range(made.payload_tokens)) for _ in range(20)
        ]
        self._prefix = "" if made.old else "(AReaL) "
        self._actor = "grpo_actor" if made.old else "ppo_actor"

    # ── trainer ──

    def trainer(self) -> Iterator[str]:
        """The trainer's log, a piece at a time."""
        yield self._line("Launcher", "Experiment made, is_recover_run=False")
        if self.made.fails == "startup_oom":
            yield from self._traceback(
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "__init__"
            )
            return
        for step in self._numbers():
            yield from self.step(step)
            if self.made.fails in ("trainer_oom", "transfer_oom") and step == self.made.onset - 1:
                frames = {"trainer_oom": "backward", "transfer_oom": "_update_weights_from_distributed"}
                yield from self._traceback(
                    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.50 GiB. GPU 0 has 79.1 GiB",
                    frames[self.made.fails],
                )
                return

    def _numbers(self) -> Iterator[int]:
        made = self.made
        if made.recovers_at is None:
            yield from range(made.steps)
            return
        yield from range(made.recovers_at)
        self.is_mended = True
        yield from range(made.back_to or 0, made.steps)

    def is_bad(self, step: int) -> bool:
        return bool(self.made.fails) and step >= self.made.onset and not self.is_mended

    def step(self, step: int) -> Iterator[str]:
        """One step: what failed in it, its line, its tables, its checkpoint."""
        bad = self.is_bad(step)
        if bad:
            yield from self._failures(step)
        for number in range(self.made.chatter):
            yield self._line(
                "[FSDPEngine Rank 0]",
                f"Microbatch #tokens (rank 0): [{1000 + number}], padded to: [1024], padding lengths: [9]",
            )
        self.now += self.made.step_s * (1 if not bad else 60 if self.made.fails == "hang" else 0.5)
        if step % 20 == 19:
            place = "/data/checkpoints/me/made/t0/default/recover_checkpoint"
            yield self._line("Recover", f"Saved recover checkpoint to {place} (with_optim=True)")
        total = self.made.steps
        yield self._line("StatsLogger", f"Epoch 1/1 Step {step + 1}/{total} Train step {step + 1}/{total} done.")
        for number in range(self.made.minibatches):
            yield self._line("StatsLogger", f"Stats ({number + 1}/{self.made.minibatches}):")
            yield self._line("StatsLogger", "")
            yield table(self._figures(step, bad) if number == 0 else {f"{self._actor}/update/grad_norm": 0.2})

    def _failures(self, step: int) -> Iterator[str]:
        fails = self.made.fails
        if fails in ("crash", "hang", "server_oom"):
            for _ in range(self.made.groups):
                yield from self._failed_rollout(refused=fails != "hang")
        elif fails == "reward_function":
            for _ in range(self.made.groups):
                yield self._line("reward_api", "Computing reward timeout after 15s. Set reward to 0.", "WARNING")

    def _failed_rollout(self, *, refused: bool) -> Iterator[str]:
        tokens = self._random.choice(self._payloads)
        last = (
            f"Cannot connect to host {ADDRESS} ssl:default [Connect call failed ('127.0.0.1', 30000)]"
            if refused
            else ""
        )
        if refused:
            yield (
                "Traceback (most recent call last):\n"
                '  File "/env/lib/site-packages/aiohttp/connector.py", line 1115, in _wrap_create_connection\n'
                "    sock = await aiohappyeyeballs.start_connection(\n"
                "ConnectionRefusedError: [Errno 111] Connect call failed ('127.0.0.1', 30000)\n"
            )
        else:
            yield (
                "Traceback (most recent call last):\n"
                '  File "/env/lib/python3.12/site-packages/aiohttp/client.py", line 700, in _request\n'
                "    raise asyncio.TimeoutError from exc\n"
                "TimeoutError\n"
            )
        yield self._line(
            "WorkflowExecutor",
            f"Workflow execution failed: Failed after 3 retries each. Payload: {{'input_ids': [{tokens}]}}. "
            f"Addr: {ADDRESS}. Endpoint: /generate. Last error: {last}",
            "ERROR",
        )

    def _figures(self, step: int, bad: bool) -> dict[str, float]:
        noise = self._random.gauss
        actor, reward = self._actor, min(max(self._reward(step, bad), 0.0), 1.0)
        waits = 3600.0 if bad and self.made.fails == "hang" else 0.8 if bad and self.made.fails == "crash" else 30.0
        worn = min(1.0, max(0.0, (step - self.made.onset) / 40)) if self.made.fails == "degradation" else 0.0
        figures = {
            f"{actor}/task_reward/avg": reward,
            f"{actor}/task_reward/min": 0.0,
            f"{actor}/task_reward/max": 1.0 if reward > 0 else 0.0,
            f"{actor}/final_reward/avg": 0.0,
            f"{actor}/n_seqs": 128.0,
            f"{actor}/seq_len/avg": 400 + noise(0, 8) + 300 * worn,
            f"{actor}/no_eos_ratios/avg": 0.05 + 0.5 * worn,
            f"{actor}/update/entropy/avg": 0.4 + noise(0, 0.01) - 0.35 * worn,
            f"{actor}/update/grad_norm": 0.2 + abs(noise(0, 0.02)) + 3.0 * (worn > 0 and step - self.made.onset < 3),
            f"{actor}/update/update_successful": 1.0,
            f"{actor}/update/actor_loss/avg": noise(0, 1e-3),
            **{f"{actor}/{key}": noise(0, 1) for key in MORE_KEYS},
            "timeperf/rollout": waits + noise(0, 0.5) * (waits > 1),
            "timeperf/train_step": 20 + noise(0, 0.3),
            "timeperf/update_weights": 1.2,
        }
        if not (bad and self.made.fails in ("crash", "hang", "server_oom")):
            figures |= {"rollout/reward": reward, "rollout/accepted": 1.0}
        if self.made.old:
            figures[f"{actor}/grad_norm"] = figures.pop(f"{actor}/update/grad_norm")
        return figures

    def _reward(self, step: int, bad: bool) -> float:
        if step in self.made.rewards:
            return self.made.rewards[step]
        level = 0.34 + 0.46 * (1 - math.exp(-step / 40))
        if bad and self.made.fails == "degradation":
            level *= max(0.1, 1 - (step - self.made.onset + 1) / 40)
        elif bad and self.made.fails in ("crash", "hang", "server_oom", "reward_function"):
            return 0.0
        return level + self._random.gauss(0, 0.04)

    def _traceback(self, error: str, frame: str) -> Iterator[str]:
        yield self._line("Trainer", "Traceback of the failure follows", "ERROR")
        yield (
            "Traceback (most recent call last):\n"
            f'  File "/env/areal/engine/fsdp_engine.py", line 512, in {frame}\n'
            f"    self.{frame}()\n"
            f"{error}\n"
        )

    def _line(self, logger: str, text: str, level: str = "INFO") -> str:
        stamp = time.strftime("%Y%m%d-%H:%M:%S", time.gmtime(self.now)) + f".{int(self.now % 1 * 1000):03d}"
        if self.made.plain:
            return f"{self._prefix}{stamp} {logger} {level}: {text}\n"
        prefix = f"{GREEN}{BROWN}{self._prefix.strip()}{RESET} " if self._prefix else ""
        return f"{prefix}{GREEN}{stamp} {logger} {level}: {text}{RESET}\n"

    # ── server ──

    def server(self, every_s: float = 2.0) -> Iterator[str]:
        """The server's log of the same run: batches while it runs, and how it ends."""
        made = self.made
        end = BEGIN + made.step_s * (made.onset if made.fails in ("crash", "hang", "server_oom") else made.steps)
        yield f"[{_iso(self.now)}] server_args=ServerArgs(mem_fraction_static=0.8, watchdog_timeout=300)\n"
        if made.fails == "startup_oom":
            yield 'Traceback (most recent call last):\n  File "/env/sglang/srt/pool.py", in init_memory_pool\n'
            yield "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n"
            return
        yield f"[{_iso(self.now)}] The server is fired up and ready to roll!\n"
        while self.now < end:
            yield (
                f"[{_iso(self.now)}] Decode batch, #running-req: 48, #token: {self._random.randrange(90_000)}, "
                f"token usage: 0.31, cuda graph: True, gen throughput (token/s): {self._random.gauss(4000, 90):.2f}, "
                "#queue-req: 0, \n"
            )
            self.now += every_s
        if made.fails == "server_oom":
            yield (
                f"[{_iso(self.now)}] Scheduler hit an exception: Traceback (most recent call last):\n"
                '  File "/env/sglang/srt/managers/scheduler.py", line 2012, in event_loop_overlap\n'
                "    result = self.run_batch(batch)\n"
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has 79.1 GiB\n"
            )
        if made.fails in ("crash", "server_oom"):
            stamp = time.strftime("%Y%m%d-%H:%M:%S.000", time.gmtime(self.now))
            yield f"{stamp} SGLangServer INFO: SGLang server http://{ADDRESS} exits, returncode=-9\n"

    def merged(self) -> Iterator[str]:
        """trainer and server in one, as the single controller writes them: each line with its role."""
        server, trainer = RunMaker(self.made), RunMaker(self.made)
        dated = heapq.merge(
            (("llm_server", line, server.now) for line in server.server()),
            (("actor", line, trainer.now) for line in trainer.trainer()),
            key=lambda item: item[2],
        )
        for role, piece, _ in dated:
            yield from (f"{f'[{role}]':<10} {line}\n" for line in piece.splitlines())

    def write(self, folder: Path, *, merged: bool = False) -> Path:
        """trainer.log and llm_server.log in `folder`, or merged.log."""
        folder.mkdir(parents=True, exist_ok=True)
        if merged:
            (folder / "merged.log").write_text("".join(self.merged()))
            return folder
        (folder / "trainer.log").write_text("".join(RunMaker(self.made).trainer()))
        (folder / "llm_server.log").write_text("".join(RunMaker(self.made).server()))
        return folder


def _iso(now: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now))


def table(figures: Mapping[str, float]) -> str:
    """A table in box characters, four pairs a row, the pairs going down the columns."""
    names = sorted(figures)
    rows = -(-len(names) // PAIRS_A_ROW)
    columns = [names[i : i + rows] for i in range(0, len(names), rows)]
    widths = [max(len(name) for name in column) for column in columns]

    def rule(left: str, middle: str, right: str, line: str) -> str:
        return left + middle.join(f"{line * (width + 2)}{middle}{line * 13}" for width in widths) + right

    lines = [rule("╒", "╤", "╕", "═")]
    for row in range(rows):
        cells = [
            f" {column[row]:<{width}} │ {figures[column[row]]:>11.4e} "
            if row < len(column)
            else f" {'':<{width}} │ {'':>11} "
            for column, width in zip(columns, widths, strict=True)
        ]
        lines.append("│" + "│".join(cells) + "│")
        lines.append(rule("├", "┼", "┤", "─"))
    lines[-1] = rule("╘", "╧", "╛", "═")
    return "\n".join(lines) + "\n"
