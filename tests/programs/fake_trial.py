"""A trial's run without anything of a run: `python -m tests.programs.fake_trial key=value …` writes what one would have
written. With `-m` it is the real sweep over such trials.

It takes the run's lock, records `run.started`, does what sglang.max_total_tokens says, and writes its starts and the
signals that it got to `{fileroot}/lives.txt`, a line each.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal, append_line
from launcher.run_files.run_paths import RunLock, RunPaths

OUT_OF_MEMORY, REFUSED, CRASHES, WAITS, HALTS = 20000, 3000, 4000, 5000, 6000
"""Sizes of the token pool at which a trial does that; at WAITS + 1 it waits too. Any other FINISHES, with a step of as
many milliseconds."""


def main() -> None:
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    config = RunConfig(experiment_name="arithmetic_cpu", trial_name=given["trial_name"])
    config.cluster.fileroot = given["cluster.fileroot"]
    tokens = int(given["sglang.max_total_tokens"])
    lives = Path(config.cluster.fileroot) / "lives.txt"

    def tell(what: str) -> None:
        with lives.open("a") as file:
            file.write(f"{what} {tokens} {os.getpid()}\n")

    signal.signal(signal.SIGINT, lambda *_: tell("interrupted"))
    if tokens == REFUSED:
        print("error: memory: host memory: 9 GiB are planned\n  → take less", file=sys.stderr)
        sys.exit(2)
    paths = RunPaths.of(config)
    paths.prepare()
    with RunLock(paths) as lock:
        journal = Journal(paths.events, lock.next_attempt(), time.time)
        journal.record("run.started", reason="fresh")
        tell("started")
        sys.exit(live(tokens, lives, journal, paths, given))


def live(tokens: int, lives: Path, journal: Journal, paths: RunPaths, given: dict[str, str]) -> int:
    if tokens == OUT_OF_MEMORY:
        assert given["memory.give_way"] == "false"
        journal.record("run.errored", reason="server_oom of server-0 (server_host): said its log")
        return 3
    if tokens == CRASHES:
        print("Segmentation fault")
        return 1
    if tokens == HALTS:
        journal.record("run.errored", reason="server_crash of server-0: as often as it was started")
        return 3
    go = lives.with_name("go")
    while tokens in (WAITS, WAITS + 1) and not go.exists():
        if f"interrupted {tokens} {os.getpid()}\n" in lives.read_text():
            journal.record("run.aborted", reason="ended by the user")
            return 130
        with contextlib.suppress(InterruptedError):
            time.sleep(0.01)
    append_line(
        paths.metrics,
        {"global_step": 0, "attempt": 1, "rollout/reward": 0.5, "timeperf/step_s": tokens / 1000},
    )
    journal.record("run.finished", reason="all steps", total_train_steps=120, total_train_epochs=1)
    return 0


if __name__ == "__main__":
    if "-m" in sys.argv[1:]:
        from launcher.__main__ import main as launcher  # a second's imports, of which a trial has no need

        sys.exit(launcher(("-m", "tests.programs.fake_trial")))
    main()
