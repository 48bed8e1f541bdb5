"""Saves and prunes in forks that are killed before a system call of a given number: `python -m
tests.programs.killed_saver ROOT` reads `STEP CALL SECONDS`, one order a line.

CALL 0: after so many seconds; CALL -1: not at all, after one round; the answer then counts its calls. A fork is traced
(ptrace), so that what the interpreter's own C code asks of the system counts too: write, fsync and close.
"""

import ctypes
import os
import platform
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from launcher.checkpoints.checkpoint_store import CheckpointName, CheckpointStore

CALLS = {
    "x86_64": {
        1: "write",
        3: "close",
        18: "pwrite",
        74: "fsync",
        75: "fdatasync",
        77: "ftruncate",
        82: "rename",
        83: "mkdir",
        84: "rmdir",
        86: "link",
        87: "unlink",
        88: "symlink",
        90: "chmod",
        91: "fchmod",
        257: "open",
        258: "mkdir",
        263: "unlink",
        264: "rename",
        268: "chmod",
        280: "utimens",
        316: "rename",
    },
    "aarch64": {
        34: "mkdir",
        35: "unlink",
        36: "symlink",
        37: "link",
        38: "rename",
        46: "ftruncate",
        52: "fchmod",
        53: "chmod",
        56: "open",
        57: "close",
        64: "write",
        68: "pwrite",
        82: "fsync",
        83: "fdatasync",
        88: "utimens",
        276: "rename",
    },
}.get(platform.machine(), {})
"""What a file system notices, by the numbers of the system calls."""
TRACE_ME, GO_ON, SET_OPTIONS, CALL_INFO = 0, 24, 0x4200, 0x420E
STOP_IS_A_CALL, DIES_WITH_ITS_TRACER = 1, 0x100000
CALL_STOP = signal.SIGTRAP | 0x80
ENTERS = 1
KEPT = 2


def ptrace(request: int, pid: int, addr: int = 0, data: object = 0) -> int:
    done = libc.ptrace(request, pid, ctypes.c_void_p(addr), data if data else None)
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long


def save_and_prune(store: CheckpointStore, step: int) -> None:
    with store.staging(CheckpointName(epoch=0, epoch_step=step, global_step=step)) as staged:
        for name in ("model.safetensors", "optimizer.bin"):
            (staged / name).write_bytes(f"{name} {step} ".encode() * 9000)
        store.commit(
            staged, global_step=step, policy_version=step + 1, config_fingerprint={}, health={}, keep=step == 0
        )
    store.prune(KEPT)


def entered(pid: int) -> str:
    """The call that a stopped fork is about to make; "" where it makes none that counts, or comes out of one."""
    info = (ctypes.c_uint64 * 16)()
    ptrace(CALL_INFO, pid, ctypes.sizeof(info), ctypes.byref(info))
    return CALLS.get(info[3], "") if info[0] & 0xFF == ENTERS else ""


def traced(pid: int, kill_before: int, counted: frozenset[str] = frozenset(CALLS.values())) -> Counter[str]:
    """Until its end, or until it is killed before that call of those that are counted."""
    seen: Counter[str] = Counter()
    os.waitpid(pid, 0)
    ptrace(SET_OPTIONS, pid, 0, ctypes.c_void_p(STOP_IS_A_CALL | DIES_WITH_ITS_TRACER))
    passed = 0
    while True:
        ptrace(GO_ON, pid, 0, ctypes.c_void_p(passed))
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            return seen
        passed = 0 if os.WSTOPSIG(status) in (CALL_STOP, signal.SIGSTOP) else os.WSTOPSIG(status)
        if os.WSTOPSIG(status) == CALL_STOP and (call := entered(pid)) in counted:
            seen[call] += 1
            if seen.total() == kill_before:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return seen


def main() -> None:
    root = Path(sys.argv[1])
    store = CheckpointStore(root)
    for step in range(3):
        save_and_prune(store, step)
    print("ready", flush=True)
    for line in sys.stdin:
        step, call, seconds = int(line.split()[0]), int(line.split()[1]), float(line.split()[2])
        save_and_prune(store, step)  # each kill meets the same state: nothing left over, one to remove
        child = os.fork()
        if child == 0:
            if call:
                ptrace(TRACE_ME, 0)
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                step += 1
                save_and_prune(CheckpointStore(root), step)
                if call < 0:
                    os._exit(0)
        if call:
            print(dict(traced(child, call)), flush=True)
            continue
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print({}, flush=True)


if __name__ == "__main__":
    main()
