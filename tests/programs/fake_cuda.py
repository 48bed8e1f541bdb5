"""SGLang's own argument parser as it would be on a GPU: `python -m tests.programs.fake_cuda H100 <JSON> [import]`.

torch.cuda answers for the named card. The JSON is a list of a server's arguments for each server; the last line printed
is what SGLang makes of each, as JSON. With `import` its server's module is imported first.
"""

import importlib
import json
import sys
from types import SimpleNamespace
from unittest.mock import patch

import torch

from actors.serving import auth_middleware, sgl_kernel_stand_in

CARDS = {
    "H200": ("NVIDIA H200", 139.8, (9, 0), 132),
    "H100": ("NVIDIA H100 80GB HBM3", 79.1, (9, 0), 132),
    "A100": ("NVIDIA A100-SXM4-80GB", 79.1, (8, 0), 108),
    "4090": ("NVIDIA GeForce RTX 4090", 23.5, (8, 9), 128),
}


def main() -> None:
    name, gib, capability, processors = CARDS[sys.argv[1]]
    memory = int(gib * 2**30)
    properties = SimpleNamespace(
        name=name,
        total_memory=memory,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=processors,
        shared_memory_per_block_optin=232448,
        warp_size=32,
    )
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: name,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (memory, memory),
        "set_device": lambda *_: None,
        "is_initialized": lambda: True,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
    }
    for function, answer in answers.items():
        patch.object(torch.cuda, function, answer).start()
    sgl_kernel_stand_in.install()
    if sys.argv[3:] == ["import"]:
        importlib.import_module("sglang.srt.entrypoints.http_server")
    from sglang.srt.server_args import prepare_server_args

    kept = ("attention_backend", "sampling_backend", "page_size", "mem_fraction_static", "dtype", "context_length")
    found = []
    for words in json.loads(sys.argv[2]):
        made = prepare_server_args(words)
        auth_middleware.refuse_bypasses(made)
        graphs = {"graphs": made.cuda_graph_config.decode.bs, "graph_mib": made.reserve_for_graph_mb()}
        found.append({key: getattr(made, key) for key in kept} | graphs)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
