"""What this card does at most, measured in five seconds: copies, and a product in bfloat16, of random data."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

WARM_UP = 3
"""Calls that are not counted: the first ones load kernels, and the clocks rise."""


def timed(work: Callable[[], object], times: int = 10) -> float:
    """Seconds of one call, in the median."""
    seconds: list[float] = []
    for _ in range(times + WARM_UP):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return median(seconds[WARM_UP:])


def main() -> None:
    gpu = torch.cuda.get_device_properties(0)
    what = f"sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} multiprocessors, torch {torch.__version__}"
    print(f"{gpu.name}: {gpu.total_memory / 2**30:.1f} GiB, {what}")
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    print(f"copy: {2 * source.numel() / timed(lambda: target.copy_(source)) / 1e12:.2f} TB/s, read and written")
    one, two = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    print(f"product: {2 * 8192**3 / timed(lambda: one @ two) / 1e12:.0f} TFLOP/s in bfloat16")
    for what, host in (("pageable", torch.empty(1 << 30, dtype=torch.uint8)), ("pinned", None)):
        there = torch.empty(1 << 30, dtype=torch.uint8).pin_memory() if host is None else host
        seconds = timed(lambda there=there: there.copy_(source[: 1 << 30], non_blocking=True), 3)  # type: ignore[misc]
        print(f"to the host: {there.numel() / seconds / 1e9:.1f} GB/s {what}")


if __name__ == "__main__":
    main()
