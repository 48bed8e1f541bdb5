"""The plan recommends one more server where there is room for it, and is silent where that is not known."""

from dataclasses import replace

import pytest

from launcher.checkpoints.model_files import read_shape
from launcher.resources.memory_estimate import GIB
from launcher.resources.run_plan import make_plan, recommend_server
from tests.support.preflight_parts import NO_GPU, changed
from tests.support.worlds.resources import ARITHMETIC, GSM8K, LARGE, MODEL, QWEN

APART = changed(GSM8K, sglang__gpu_fraction=1.0, actor__gpu_fraction=1.0)


def with_gpus(count):
    return replace(LARGE, gpus=LARGE.gpus * count, memory=256 * GIB)


def recommended(config, hardware, shape=QWEN):
    return recommend_server(config, hardware, make_plan(config, hardware, shape))


def test_where_a_further_gpu_is_free_one_more_is_recommended():
    assert recommended(APART, with_gpus(3)).startswith("one more server has room (sglang.n_servers=2)")
    assert recommended(changed(APART, sglang__n_servers=2), with_gpus(3)) == ""


@pytest.mark.parametrize(
    ("config", "hardware", "shape"),
    [
        (APART, with_gpus(2), QWEN),
        (APART, with_gpus(1), QWEN),
        (GSM8K, LARGE, QWEN),
        (changed(APART, cluster__address="auto"), with_gpus(3), QWEN),
        (APART, with_gpus(3), None),
        (ARITHMETIC, NO_GPU, read_shape(MODEL)),
    ],
    ids=["no GPU is free", "not even its own", "one GPU shared", "a cluster elsewhere", "sizes unknown", "on the CPU"],
)
def test_else_none_is(config, hardware, shape):
    assert recommended(config, hardware, shape) == ""
