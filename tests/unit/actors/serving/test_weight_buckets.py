"""The bytes that are broadcast, as SGLang's own code makes tensors of them again."""

import pytest
import torch

from actors.serving.weight_buckets import in_buckets

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
