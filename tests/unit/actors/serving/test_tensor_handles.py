"""Tensors sent as handles: SGLang's own unpickler reads the values, and only while they are shared."""

import base64
import io
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.multiprocessing import reductions

from actors.serving import tensor_handles
from actors.serving.tensor_handles import shared
from tests.support.machine import scaled

THEIRS = """
import sys
from torch.multiprocessing import reductions
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

def rebuilt(*arguments):
    return arguments

reductions.rebuild_cuda_tensor = rebuilt  # there is no GPU to open it on
monkey_patch_torch_reductions()
print(MultiprocessingSerializer.deserialize(sys.stdin.read()))
"""
"""What a rank of SGLang 0.5.17 does with a payload, but for the last call into CUDA."""


class SGLangsUnpickler(pickle.Unpickler):
    """Names that SGLang 0.5.17's SafeUnpickler lets through, as far as we use them."""

    def find_class(self, module, name):
        allowed = ("torch.", "builtins.", "functools.", "collections.", "multiprocessing.reduction.")
        assert f"{module}.".startswith(allowed), f"{module}.{name}"
        return super().find_class(module, name)


def unpickled(handles):
    return dict(SGLangsUnpickler(io.BytesIO(base64.b64decode(handles))).load())


def test_handles_carry_the_values_and_not_in_themselves():
    tensors = {
        "a": torch.randn(300, 400),
        "b": torch.arange(7, dtype=torch.bfloat16),
        "transposed": torch.randn(5, 3).T,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(6)),
    }
    with shared(tensors) as handles:
        assert len(handles) < 4000
        arrived = unpickled(handles)
        assert arrived.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert arrived[name].dtype == tensor.dtype
            assert torch.equal(arrived[name], tensor), name


def test_handles_are_void_outside_their_block():
    with shared({"a": torch.ones(3)}) as handles:
        pass
    with pytest.raises(RuntimeError, match="/proc/"):
        unpickled(handles)


def in_sglang(payload):
    done = subprocess.run(
        [sys.executable, "-c", THEIRS], input=payload, capture_output=True, text=True, timeout=scaled(120), check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_sglangs_own_unpickler_reads_the_values_of_shared_memory():
    pytest.importorskip("sglang")
    with shared({"w": torch.arange(4, dtype=torch.float32)}) as handles:
        assert in_sglang(handles) == "[('w', tensor([0., 1., 2., 3.]))]"


@pytest.mark.slow
def test_sglangs_own_unpickler_takes_a_handle_of_cuda_with_its_device(monkeypatch):
    """As torch makes one of a tensor on a GPU; the device is a number, which SGLang leaves as it is."""
    pytest.importorskip("sglang")
    handle = (torch.Tensor, (2,), (1,), 0, torch.storage.TypedStorage, torch.float32, 0)
    handle += (b"memory", 8, 0, False, b"counter", 0, b"event", False)
    monkeypatch.setitem(
        ForkingPickler._extra_reducers, torch.Tensor, lambda tensor: (reductions.rebuild_cuda_tensor, handle)
    )
    opened = in_sglang(tensor_handles._encoded([("w", torch.zeros(2))]))
    assert "torch.float32, 0, b'memory', 8, 0, False, b'counter', 0, b'event', False" in opened
