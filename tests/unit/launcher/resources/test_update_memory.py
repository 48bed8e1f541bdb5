"""What new weights take on their way to the servers (actor.weight_update_mode), on both sides of it."""

from dataclasses import replace

import pytest

from actors.serving import weight_buckets
from launcher.checkpoints.model_shape import known_shape
from launcher.resources import memory_estimate
from launcher.resources.memory_estimate import (
    BUCKET_BYTES,
    GIB,
    Sent,
    sent,
    server_on_cpu,
    server_on_gpu,
    trainer,
)
from launcher.resources.run_plan import make_plan
from tests.support.composed import composed
from tests.support.preflight_parts import NO_GPU, WITH_GPU, changed

GSM8K = composed("conf=gsm8k_h200")
QWEN = known_shape("Qwen/Qwen2.5-1.5B-Instruct")
VERSION = 2 * QWEN.parameters
LARGE = replace(NO_GPU, memory=200 * GIB)
APART = {"sglang__gpu_fraction": 1.0, "actor__gpu_fraction": 1.0}


def new_weights(items):
    return sum(item.bytes for item in items if item.what == "new weights")


def test_the_bucket_is_the_trainers():
    assert memory_estimate.BUCKET_BYTES == weight_buckets.BUCKET_BYTES


@pytest.mark.parametrize(
    ("settings", "on_gpu", "expected"),
    [
        ({}, True, Sent(0, 0)),
        *(
            (mode | settings, on_gpu, expected)
            for mode in ({"actor__weight_update_mode": "tensor"}, {"actor__weight_update_mode": "xccl"})
            for settings, on_gpu, expected in (
                ({}, True, Sent(VERSION + BUCKET_BYTES, 0)),
                ({"sglang__n_servers": 3}, False, Sent(VERSION + BUCKET_BYTES, 0)),
                ({"sglang__dtype": "float32"}, False, Sent(2 * VERSION + BUCKET_BYTES, 0)),
                ({"actor__dp_size": 2}, False, Sent(2 * VERSION, 0)),
            )
        ),
        ({"actor__weight_update_mode": "tensor", "actor__dp_size": 2}, True, Sent(0, 2 * VERSION)),
        ({"actor__weight_update_mode": "xccl", "actor__dp_size": 2}, True, Sent(VERSION, VERSION)),
    ],
)
def test_rank_0_holds_one_version_while_it_is_sent(settings, on_gpu, expected):
    config = changed(GSM8K, **settings)
    assert sent(config, QWEN, on_gpu=on_gpu) == expected
    assert new_weights(trainer(config, QWEN, on_gpu=on_gpu)) == expected.on_device
    assert new_weights(trainer(config, QWEN, on_gpu=on_gpu, rank=1)) == 0


@pytest.mark.parametrize(
    ("settings", "of_a_server"),
    [
        ({}, 0),
        ({"actor__weight_update_mode": "tensor"}, 0),
        ({"actor__weight_update_mode": "tensor", "actor__dp_size": 2}, 0),
        ({"actor__weight_update_mode": "xccl", **APART}, 2 * BUCKET_BYTES),
    ],
)
def test_a_server_receives_a_bucket_twice_and_reads_what_it_has_a_handle_of_where_it_is(settings, of_a_server):
    assert new_weights(server_on_gpu(changed(GSM8K, **settings), QWEN, 80 * GIB)) == of_a_server


def test_a_small_model_is_one_bucket_of_its_own_size():
    small = known_shape("Qwen/Qwen2.5-0.5B-Instruct")
    config = changed(GSM8K, actor__weight_update_mode="xccl", sglang__max_total_tokens=1000)
    assert new_weights(server_on_cpu(config, small)) == 2 * 2 * small.parameters < 2 * BUCKET_BYTES


def test_a_gpu_that_has_room_for_files_may_have_none_for_tensors():
    before, after = (
        make_plan(changed(GSM8K, actor__weight_update_mode=mode), WITH_GPU, QWEN).places for mode in ("disk", "tensor")
    )
    assert after[0].planned - before[0].planned == VERSION + BUCKET_BYTES
    assert before[1].planned - after[1].planned == 3 * VERSION, "the files in the host's memory"


def test_a_further_server_reads_the_same_bytes():
    """Each server's were a copy of its own."""
    config = changed(GSM8K, actor__weight_update_mode="tensor", sglang__device="cpu", actor__device="cpu")
    config.sglang.max_total_tokens = 1000
    one, two = (
        next(
            process
            for process in make_plan(changed(config, sglang__n_servers=servers), LARGE, QWEN).processes
            if process.placement.name == "trainer"
        )
        for servers in (1, 2)
    )
    assert new_weights(two.items) == new_weights(one.items) == VERSION + BUCKET_BYTES
