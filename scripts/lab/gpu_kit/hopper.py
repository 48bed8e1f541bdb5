"""torch.cuda as it answers on an H100, for what is imported and compiled where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import torch

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    shared_memory_per_block_optin=232448,
    warp_size=32,
)
ANSWERS = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_name": lambda *_: PROPERTIES.name,
    "get_device_properties": lambda *_: PROPERTIES,
    "mem_get_info": lambda *_: (PROPERTIES.total_memory, PROPERTIES.total_memory),
    "is_initialized": lambda: True,
    "set_device": lambda *_: None,
    "synchronize": lambda *_: None,
    "empty_cache": lambda: None,
}


def pretend() -> None:
    """For the rest of this process."""
    for function, answer in ANSWERS.items():
        patch.object(torch.cuda, function, answer).start()
