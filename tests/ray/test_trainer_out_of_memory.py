"""A trainer that finds no memory in a step goes on with smaller micro-batches, and no step is lost or doubled."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.journal import read_lines
from scripts.faults.place import Place
from tests.supervised_run import SupervisedRun
from tests.unit.test_starving import NEEDS_A_CGROUP

MICRO_BATCH = "actor.mb_spec.max_tokens_per_mb"
SEQUENCES = ("gconfig.n_samples=8", "train_dataset.batch_size=16")
"""128 in a batch: 5,000 tokens, for which a step takes about 130 MiB."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}

pytestmark = pytest.mark.timeout(900)


def starve(run, fileroot, fault):
    """The injector's record of it."""
    words = [sys.executable, "-m", "scripts.inject_fault", fault, "--even-the-last", "--fileroot", str(fileroot)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{run.tail()}"
    return list(read_lines(Place.of(run.paths).record))[-1]


def check(run, fileroot, fired):
    """It ran out once, what gave way took effect, and it was remembered."""
    run.finish()
    run.check_ledger()
    (ran_out,) = run.events("memory.ran_out")
    assert (ran_out["subject"], ran_out["ran_out"]) == ("trainer", "trainer_host")
    largest = ran_out["settings"]["largest_micro_batch"]
    assert 0 < largest <= 16384 // 2, "half of what is configured would change nothing"
    (restarted,) = run.events("trainer.restarted")
    assert restarted["overrides"] == {MICRO_BATCH: largest // 2}
    assert run.trainer_pids() == [*fired["pids"], restarted["pid"]]
    assert [cause for cause, subject, _ in run.incidents().values() if subject == "trainer"] == ["trainer_oom"]
    made = {line["global_step"]: line["grpo_actor/n_micro_batches"] for line in read_lines(run.paths.metrics)}
    last = run.events("trainer.restored")[-1]["global_step"]
    assert made == {step: 1.0 if step <= last else 2.0 for step in range(run.steps)}
    (book,) = (fileroot / "memory").glob("*.json")
    assert json.loads(book.read_text())["overrides"] == {MICRO_BATCH: largest // 2}


def held(pid):
    """What RLIMIT_DATA limits, bytes; 0 once it has ended."""
    try:
        words = Path(f"/proc/{pid}/status").read_text().split()
        return int(words[words.index("VmData:") + 1]) * 1024
    except (OSError, ValueError):
        return 0


def test_an_allocation_that_fails_and_the_same_limit_for_the_next_life(tmp_path):
    """The limit is not lifted: only because the micro-batch is smaller does the next life get through its steps."""
    environment = os.environ | GIVES_BACK
    with SupervisedRun(tmp_path, steps=10, servers=1, settings=SEQUENCES, environment=environment) as run:
        run.wait_steps(2)
        fired = starve(run, tmp_path, "T6:share=0.6")
        assert "DefaultCPUAllocator: can't allocate memory" in fired["proof"]
        run.wait_until(lambda: len(run.trainer_pids()) == 2, "another trainer")
        again, limit = run.trainer_pids()[1], fired["limit_bytes"]
        resource.prlimit(again, resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        run.wait_steps(run.events("trainer.restored")[-1]["global_step"] + 2)
        least = []
        while run.process.poll() is None and (now := held(again)):
            least.append(now)
            time.sleep(0.01)
        assert min(least) + fired["step_bytes"] > limit, "a step as it was before would not have fitted"
        check(run, tmp_path, fired)


@NEEDS_A_CGROUP
@pytest.mark.long
def test_a_trainer_that_the_kernel_kills(tmp_path):
    environment = os.environ | GIVES_BACK
    with SupervisedRun(tmp_path, steps=7, servers=1, settings=SEQUENCES, environment=environment) as run:
        run.wait_steps(2)
        fired = starve(run, tmp_path, "T7")
        assert fired["proof"] == "the kernel killed it for memory (oom_kill 1)"
        check(run, tmp_path, fired)
