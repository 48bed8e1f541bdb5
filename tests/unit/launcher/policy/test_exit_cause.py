"""Why a process ended, from the words that SGLang, torch, Ray and the kernel really write."""

import pytest

from launcher.base.messages import Cause
from launcher.policy.exit_cause import RanOut, find_server_cause, find_trainer_cause

CRASHED = "Subprocess scheduler_0 (pid=4711) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
SIGQUIT = "Received sigquit from a child process. It usually means the child failed."
HIT = "[2026-11-02 10:00:00] Scheduler hit an exception: Traceback (most recent call last):"
POOL_FULL = "[2026-11-02 10:00:00] KV cache pool is full. Retract requests. #retracted_reqs: 1"


@pytest.mark.parametrize(
    ("log", "exit_code", "cause", "ran_out"),
    [
        (
            [HIT, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."],
            -9,
            Cause.SERVER_OOM,
            RanOut.SERVER_POOL_TOO_SMALL,
        ),
        (
            [HIT, "RuntimeError: Prefill out of memory. Try to lower your batch size."],
            -9,
            Cause.SERVER_OOM,
            RanOut.SERVER_POOL,
        ),
        ([HIT, "Decode out of memory. Try to lower your batch size."], -9, Cause.SERVER_OOM, RanOut.SERVER_POOL),
        ([HIT, "RuntimeError: Out of memory. Try to lower your batch size."], -9, Cause.SERVER_OOM, RanOut.SERVER_POOL),
        ([HIT, "alloc_req_slots runs out of memory. Please set a smaller"], -9, Cause.SERVER_OOM, RanOut.SERVER_POOL),
        (
            [HIT, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
            -9,
            Cause.SERVER_OOM,
            RanOut.SERVER_DEVICE,
        ),
        (
            [HIT, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."],
            -9,
            Cause.SERVER_OOM,
            RanOut.SERVER_HOST,
        ),
        ([HIT, "ValueError: bad", CRASHED], -9, Cause.SERVER_CRASH, None),
        (["DetokenizerManager hit an exception: Traceback"], -9, Cause.SERVER_CRASH, None),
        (["AssertionError: Cache flush failed after updating weights"], -9, Cause.SERVER_CRASH, None),
        (["Scheduler watchdog timeout (self.watchdog_timeout=300)"], -9, Cause.SERVER_HANG, None),
        ([HIT, "safetensors_rust.SafetensorError: Error while deserializing header"], -9, Cause.SERVER_CORRUPT, None),
        ([CRASHED, SIGQUIT], -9, Cause.SERVER_CRASH, None),
        ([POOL_FULL], -15, Cause.SERVER_CRASH, None),  # a warning, no failure
        ([], None, Cause.SERVER_CRASH, None),
    ],
)
def test_a_server(log, exit_code, cause, ran_out):
    finding = find_server_cause(log, exit_code)
    assert (finding.cause, finding.ran_out) == (cause, ran_out)
    assert finding.reason
    assert finding.line == "" or finding.line in {line.strip() for line in log}


@pytest.mark.parametrize(
    ("log", "exit_code", "cause", "ran_out"),
    [
        (["torch.OutOfMemoryError: CUDA out of memory."], 1, Cause.TRAINER_OOM, RanOut.TRAINER_DEVICE),
        (["MemoryError"], 1, Cause.TRAINER_OOM, RanOut.TRAINER_HOST),
        (
            ["ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."],
            1,
            Cause.TRAINER_OOM,
            RanOut.TRAINER_HOST,
        ),
        (["launcher.base.errors.TrainerError: step 7: not finite: loss nan"], 1, Cause.NONFINITE, None),
        (["a batch was dropped, it was not finite", "ValueError: other"], 1, Cause.TRAINER_CRASH, None),
        ([], -11, Cause.TRAINER_CRASH, None),
        (["TrainerError: trainer rank 1 (process 7 of node a1) ended: it died"], None, Cause.TRAINER_CRASH, None),
        (
            ["TrainerError: trainer rank 1 (process 7 of node a1) does not answer for 11 s, it is stopped"],
            None,
            Cause.TRAINER_HANG,
            None,
        ),
        (
            ["TrainerError: trainer rank 2 failed: run: torch.OutOfMemoryError: CUDA out of memory."],
            None,
            Cause.TRAINER_OOM,
            RanOut.TRAINER_DEVICE,
        ),
        (
            ["TrainerError: trainer rank 1 (process 7 of node a1) ended: it died; Out of memory: Killed process"],
            None,
            Cause.TRAINER_OOM,
            RanOut.TRAINER_HOST,
        ),
    ],
)
def test_the_trainer(log, exit_code, cause, ran_out):
    finding = find_trainer_cause(log, exit_code)
    assert (finding.cause, finding.ran_out) == (cause, ran_out)


@pytest.mark.parametrize(
    ("exit_code", "oom_kills", "cause"),
    [
        (-9, 0, Cause.SERVER_CRASH),  # somebody's SIGKILL
        (-9, 1, Cause.SERVER_OOM),
        (137, 1, Cause.SERVER_OOM),
        (1, 1, Cause.SERVER_CRASH),  # another process of the cgroup was killed
    ],
)
def test_a_kill_is_for_memory_only_where_the_kernel_says_so(exit_code, oom_kills, cause):
    assert find_server_cause([], exit_code, oom_kills=oom_kills).cause is cause


def test_a_trainer_killed_for_memory():
    finding = find_trainer_cause([], -9, oom_kills=2)
    assert (finding.cause, finding.ran_out) == (Cause.TRAINER_OOM, RanOut.TRAINER_HOST)
    assert finding.reason == "ended by SIGKILL, and the kernel has killed for memory (oom_kill 2)"


@pytest.mark.parametrize(
    ("exit_code", "words"), [(-9, "SIGKILL"), (137, "SIGKILL"), (3, "exited with 3"), (None, "not known")]
)
def test_the_exit_is_said_in_words(exit_code, words):
    assert words in find_server_cause([], exit_code).reason
