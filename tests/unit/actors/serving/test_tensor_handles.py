"""Tensors sent as handles: SGLang's own unpickler reads the values, and only while they are shared."""

import base64
import io
import pickle

import pytest
import torch

from actors.serving.tensor_handles import shared


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
