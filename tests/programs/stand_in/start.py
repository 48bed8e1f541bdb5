"""What the stand-in server does before it listens: take memory or refuse to, start children."""

import argparse
import subprocess
import sys

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"


def start_tree() -> None:
    """A child, and a daemon that has left session and parent."""
    subprocess.Popen([sys.executable, "-S", "-c", CHILD])
    daemon = f"import os\nif os.fork(): os._exit(0)\nos.setsid()\n{CHILD}"
    subprocess.run([sys.executable, "-S", "-c", daemon], check=True, env={})


def fits_or_exits(arguments: argparse.Namespace) -> None:
    """A machine with room for some sizes of the token pool only; said in SGLang's and torch's words."""
    tokens, most, least = arguments.max_total_tokens, arguments.out_of_memory_above, arguments.too_small_below
    if most is not None and tokens > most:
        print("RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory:")
        sys.exit(1)
    if least is not None and tokens < least:
        print("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
        sys.exit(1)


def take_pool(arguments: argparse.Namespace) -> None:
    """The memory of a pool of `--max-total-tokens`, every page of it, as SGLang's allocator would ask for it."""
    import torch

    arguments.pool = torch.ones(arguments.max_total_tokens * arguments.bytes_per_token, dtype=torch.uint8)
