"""A trainer that finds no memory in a step goes on with smaller micro-batches, and no step is lost or doubled."""

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.run_files.journal import read_lines
from scripts.faults.fault_paths import FaultPaths
from tests.programs.supervised_run import SupervisedRun
from tests.support.worlds.faults import NEEDS_A_CGROUP

MICRO_BATCH = "actor.mb_spec.max_tokens_per_mb"
SEQUENCES = ("gconfig.n_samples=8", "train_dataset.batch_size=16", "train_dataset.max_items=160")
"""128 in a batch: 5,000 tokens, for which a step takes about 130 MiB. Ten whole batches an epoch: the rest of one would
fit into a single micro-batch of half the size."""
NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "memory allocation of ", "RAW: mmap error: 12")
"""PyTorch's, Rust's for safetensors, abseil's for Ray: whichever of the trainer's threads asks first."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}

pytestmark = pytest.mark.timeout(900)


def starve(run, fileroot, fault):
    """The injector's record of it."""
    words = [sys.executable, "-m", "scripts.inject_fault", fault, "--even-the-last", "--fileroot", str(fileroot)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{run.tail()}"
    return list(read_lines(FaultPaths(run.paths).record))[-1]


def check(run, fileroot, fired):
    """What gave way took effect, and was remembered. A second rung may be due where the limit was not lifted."""
    run.finish()
    run.check_ledger()
    ends, lives = run.events("memory.ran_out"), run.events("trainer.restarted")
    assert {(end["subject"], end["ran_out"]) for end in ends} == {("trainer", "trainer_host")}
    assert ends[0]["settings"]["largest_micro_batch"] <= 16384 // 2, "half of what is configured would change nothing"
    given = [life["overrides"][MICRO_BATCH] for life in lives]
    assert given == [end["settings"]["largest_micro_batch"] // 2 for end in ends]
    assert run.trainer_pids() == [*fired["pids"], *(life["pid"] for life in lives)]
    assert {cause for cause, subject, _ in run.incidents().values() if subject == "trainer"} == {"trainer_oom"}
    made = {line["global_step"]: line["grpo_actor/n_micro_batches"] for line in read_lines(run.paths.metrics)}
    restored = [event["global_step"] for event in run.events("trainer.restored") if event["time"] > ends[0]["time"]]
    assert [step for step in range(run.steps) if made[step] == 1.0] == list(range(restored[0] + 1))
    (book,) = (fileroot / "memory").glob("*.json")
    assert json.loads(book.read_text())["overrides"] == {MICRO_BATCH: given[-1]}


def held(pid):
    """What RLIMIT_DATA limits, bytes; 0 once it has ended."""
    try:
        words = Path(f"/proc/{pid}/status").read_text().split()
        return int(words[words.index("VmData:") + 1]) * 1024
    except (OSError, ValueError):
        return 0


def test_an_allocation_that_fails_and_the_same_limit_for_all_lives_to_come(tmp_path):
    """The limit is not lifted: only because the micro-batch is smaller does a later life get through its steps."""
    environment = os.environ | GIVES_BACK
    with SupervisedRun(tmp_path, steps=20, servers=1, settings=SEQUENCES, environment=environment) as run:
        run.wait_steps(2)
        fired = starve(run, tmp_path, "T6:share=0.6")
        assert any(words in fired["proof"] for words in NO_MEMORY), fired["proof"]
        limit = (fired["limit_bytes"], resource.RLIM_INFINITY)
        least: dict[int, int] = {}
        while run.process.poll() is None:
            if (lives := run.trainer_pids()[1:]) and (now := held(lives[-1])):
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(lives[-1], resource.RLIMIT_DATA, limit)
                least[lives[-1]] = min(now, least.get(lives[-1], now)) if is_stepping(run, lives) else now
            time.sleep(0.02)
        check(run, tmp_path, fired)
        last = least[run.trainer_pids()[-1]]
        assert last + fired["step_bytes"] > limit[0], "a step as it was before would not have fitted"


def is_stepping(run, lives):
    """The newest life has gone through a step: what it holds is no longer what it has loaded."""
    restored = run.events("trainer.restored")
    return len(restored) == 1 + len(lives) and run.steps_done() >= restored[-1]["global_step"] + 2


@NEEDS_A_CGROUP
@pytest.mark.long
def test_a_trainer_that_the_kernel_kills(tmp_path):
    environment = os.environ | GIVES_BACK
    with SupervisedRun(tmp_path, steps=16, servers=1, settings=SEQUENCES, environment=environment) as run:
        run.wait_steps(2)
        fired = starve(run, tmp_path, "T7")
        assert fired["proof"] == "the kernel killed it for memory (oom_kill 1)"
        check(run, tmp_path, fired)
