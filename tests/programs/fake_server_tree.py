"""The processes of a server without a server: `python -m tests.programs.fake_server_tree`, with
PROMETHEUS_MULTIPROC_DIR set.

A root with two children that bear the titles of SGLang's scheduler and detokenizer. The scheduler counts tokens in
prometheus_client's own file, as SGLang's does, one more every few milliseconds; beside it a series of another name.
Prints `up` when all are there.
"""

import ctypes
import os
import sys
import time

PR_SET_NAME = 15
PR_SET_PDEATHSIG = 1


def child(title: str, work) -> None:
    ready, told = os.pipe()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)
        ctypes.CDLL(None).prctl(PR_SET_NAME, title.encode()[:15])
        work(told)
    os.read(ready, 1)


def schedule(told: int) -> None:
    from prometheus_client import Counter

    tokens = Counter("sglang:realtime_tokens_total", "as SGLang words it", ["mode"])
    Counter("sglang:generation_tokens_total", "of finished requests").inc(1e6)
    tokens.labels(mode="prefill_compute").inc(3)
    os.write(told, b"+")
    while True:
        tokens.labels(mode="decode").inc()
        time.sleep(0.005)


def sleep(told: int) -> None:
    os.write(told, b"+")
    while True:
        time.sleep(1000)


def main() -> None:
    if "--no-tokens" in sys.argv:
        child("sglang::scheduler", sleep)
    else:
        child("sglang::scheduler_TP0", schedule)
    child("sglang::detokenizer", sleep)
    print("up", flush=True)
    while True:
        time.sleep(1000)


if __name__ == "__main__":
    main()
