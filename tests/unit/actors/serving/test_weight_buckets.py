"""Buckets of weights: what is broadcast, and what is sent as a handle, SGLang's own code reads as it was written."""

import base64
import gc
import io
import json
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import reductions

from actors.serving.weight_buckets import WeightBucket, handle_of, in_buckets, in_memory_file
from tests.support.machine import scaled

WEIGHTS = {
    "a": torch.randn(3, 5).T,  # not contiguous
    "b": torch.arange(4, dtype=torch.float32),
    "empty": torch.zeros(0, 2),
}


@pytest.mark.slow  # SGLang takes seconds to import
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most_bytes", [1, 2**30])
def test_sglang_reads_what_was_written(dtype, most_bytes):
    tensor_bucket = pytest.importorskip("sglang.srt.weight_sync.tensor_bucket")
    weights = {name: tensor.to(dtype) for name, tensor in WEIGHTS.items()}
    buckets = in_buckets(weights.items(), device="cpu", most_bytes=most_bytes)
    assert len(buckets) == (1 if most_bytes > 1 else 3)
    read = {}
    for bucket in buckets:
        made = [
            (name, torch.empty(shape, dtype=getattr(torch, of)))
            for name, of, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True)
        ]
        theirs = tensor_bucket.FlattenedTensorBucket(named_tensors=made)  # as the server does, which then receives
        assert theirs.get_flattened_tensor().shape == bucket.flat.shape
        theirs.get_flattened_tensor().copy_(bucket.flat)
        read |= dict(theirs.reconstruct_tensors())
    assert list(read) == list(weights)
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def test_it_shares_no_memory_with_the_model():
    weights = {"w": torch.zeros(4)}
    (bucket,) = in_buckets(weights.items(), device="cpu")
    weights["w"] += 1
    assert not bucket.flat.any()


def test_on_another_device_there_is_no_file_to_map():
    (bucket,) = in_buckets([("v", torch.ones(3)), ("w", torch.ones(2, 2))], device="meta")
    assert (bucket.flat.device.type, bucket.flat.shape, bucket.file) == ("meta", (28,), "")
    (bucket,) = in_buckets([("v", torch.ones(3, device="meta"))])
    assert bucket.flat.device.type == "meta", "where the weights are"


# ── handles: SGLang's own unpickler reads the values, and only while the bucket is held ──

THEIRS = """
import json, sys
from types import SimpleNamespace
from torch.multiprocessing import reductions
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

def rebuilt(*arguments):
    return arguments

reductions.rebuild_cuda_tensor = rebuilt  # there is no GPU to open it on
monkey_patch_torch_reductions()
found = []

class Runner:
    def load_weights(self, named_tensors):
        found.append(str([(name, str(tensor.dtype), tensor.tolist()) for name, tensor in named_tensors]))

for payload in json.loads(sys.stdin.read()):
    sent = MultiprocessingSerializer.deserialize(payload)
    if isinstance(sent["flattened_tensor"], tuple):
        places = [(one.name, one.start_idx, one.end_idx) for one in sent["metadata"]]
        found.append(f"{sent['flattened_tensor']} {places}")
    else:
        WeightUpdater._update_weights_from_flattened_bucket(SimpleNamespace(get_model=Runner), sent)
print(json.dumps(found))
"""
"""What a rank of SGLang 0.5.17 does with a payload, but for the last call into CUDA, or into the model."""


class SGLangsUnpickler(pickle.Unpickler):
    """Names that SGLang 0.5.17's SafeUnpickler lets through, as far as we use them."""

    def find_class(self, module, name):
        allowed = ("torch.", "builtins.", "functools.", "types.", "multiprocessing.reduction.")
        assert f"{module}.".startswith(allowed), f"{module}.{name}"
        return super().find_class(module, name)


def unpickled(handle):
    """The tensors, by SGLang's arithmetic."""
    sent = SGLangsUnpickler(io.BytesIO(base64.b64decode(handle))).load()
    flat = sent["flattened_tensor"]
    assert all(one.numel == one.end_idx - one.start_idx for one in sent["metadata"])
    return {one.name: flat[one.start_idx : one.end_idx].view(one.dtype).reshape(one.shape) for one in sent["metadata"]}


def test_handles_carry_the_values_and_not_in_themselves():
    tensors = {
        "a": torch.randn(300, 400),
        "transposed": torch.randn(5, 3).T,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(6)),
        "odd": torch.arange(7, dtype=torch.bfloat16),
        "after": torch.randn(2),
    }
    buckets = in_buckets(tensors.items())
    assert [bucket.dtypes[0] for bucket in buckets] == ["float32", "bfloat16", "float32"]
    handles = [handle_of(bucket) for bucket in buckets]
    assert sum(map(len, handles)) < 4000
    arrived = {name: tensor for handle in handles for name, tensor in unpickled(handle).items()}
    assert arrived.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor), name


def test_nothing_is_nothing_on_the_other_side():
    (bucket,) = in_buckets([("empty", torch.empty(0, 4))])
    assert unpickled(handle_of(bucket))["empty"].shape == (0, 4)


def test_a_handle_is_void_when_its_bucket_is_gone():
    buckets = in_buckets([("a", torch.ones(3))])
    handle = handle_of(buckets[0])
    assert torch.equal(unpickled(handle)["a"], torch.ones(3))
    buckets.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match="/proc/"):
        unpickled(handle)


def test_the_file_is_closed_with_the_last_view_of_it():
    flat, file = in_memory_file([torch.ones(3, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)])
    assert flat.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    view = flat[2:4]
    del flat
    assert Path(file).exists()
    del view
    assert not Path(file).exists()


@pytest.fixture(scope="module")
def in_sglang():
    """What SGLang's own code makes of a bucket in shared memory, and of one on a GPU. Its import takes nearly all of
    the time of both."""
    pytest.importorskip("sglang")
    (bucket,) = in_buckets([("v", torch.ones(1, dtype=torch.bfloat16)), ("w", torch.full((1, 2), 2.0).bfloat16())])
    handles = [handle_of(bucket), handle_of_cuda()]
    done = subprocess.run(
        [sys.executable, "-c", THEIRS],
        input=json.dumps(handles),
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def handle_of_cuda():
    handle = (torch.Tensor, (12,), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0)
    handle += (b"memory", 12, 0, False, b"counter", 0, b"event", False)
    on_gpu = WeightBucket(
        names=("v", "w"),
        dtypes=("bfloat16", "bfloat16"),
        shapes=((4,), (2, 1)),
        flat=torch.zeros(12, dtype=torch.uint8),
        file="",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            ForkingPickler._extra_reducers, torch.Tensor, lambda tensor: (reductions.rebuild_cuda_tensor, handle)
        )
        return handle_of(on_gpu)


@pytest.mark.slow
def test_sglangs_own_code_reads_the_values_of_shared_memory(in_sglang):
    assert in_sglang[0] == "[('v', 'torch.bfloat16', [1.0]), ('w', 'torch.bfloat16', [[2.0, 2.0]])]"


@pytest.mark.slow
def test_sglangs_own_unpickler_takes_a_handle_of_cuda_with_its_device(in_sglang):
    """As torch makes one of a tensor on a GPU; the device is a number, which SGLang leaves as it is."""
    assert "torch.uint8, 0, b'memory', 12, 0, False, b'counter', 0, b'event', False" in in_sglang[1]
    assert in_sglang[1].endswith("[('v', 0, 8), ('w', 8, 12)]")
