"""A cluster whose second node can't run what a GPU run would place there: told before anything is started."""

import re
import subprocess
import sys

import pytest

from tests.support import nvml
from tests.support.clusters.raylets import Raylets
from tests.support.machine import scaled


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The head has no GPU; the other node has two, an old driver, and the variables of another launcher."""
    folder = tmp_path_factory.mktemp("cluster")
    nvml.build(folder)
    answers = ("NVML_GPUS=2", "NVML_CUDA=12080", "NVML_DRIVER=570.86.10", "NVML_MIG=1", "LOCAL_RANK=0")
    with Raylets(folder) as cluster:
        cluster.add(cpus=2, gpus=2, prefix=("env", f"LD_LIBRARY_PATH={folder}", *answers))
        yield cluster


def launcher(cluster, *words):
    return subprocess.run(
        [sys.executable, "-m", "launcher", *words],
        capture_output=True,
        text=True,
        timeout=scaled(240),
        check=False,
        env=cluster.environment,
    )


def test_the_doctor_asks_each_node(cluster):
    done = launcher(cluster, "doctor", f"address={cluster.address}")
    assert done.returncode == 4, done.stderr
    tables = re.split(r"^node ", done.stdout, flags=re.MULTILINE)[1:]
    other, head = sorted((" ".join(table.split()) for table in tables), key=lambda table: "570.86.10" not in table)
    assert "NVML finds no driver" in head
    for said in ("570.86.10, for CUDA 12.8: too old for torch", "divided by MIG", "LOCAL_RANK=0", "branch 580"):
        assert said in other


def test_a_run_on_gpus_is_refused_with_what_its_node_lacks(cluster, tmp_path):
    words = ("conf=arithmetic_cpu", f"cluster.address={cluster.address}", "sglang.device=cuda", "actor.device=cuda")
    done = launcher(cluster, *words, f"cluster.fileroot={tmp_path}", "hardware.gpu_memory_gib=140")
    assert done.returncode == 2, done.stderr
    assert "driver: 570.86.10, for CUDA 12.8: too old for torch" in done.stderr + done.stdout
    assert "LOCAL_RANK=0" in done.stderr + done.stdout
    assert "NVML finds no driver" not in done.stderr + done.stdout, "the head's node gets nothing that needs a GPU"
    assert not list(tmp_path.rglob("llm_server-*.log")), "nothing was started"
