"""The command for a first GPU, whole, on the CPU: each part is ok or says why it was skipped."""

import json

import pytest

from scripts.lab.gpu_smoke import main
from tests.support.machine import scaled

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

NEED_A_GPU = ("nvml", "memory", "server_oom_cuda", "trainer_oom_cuda")


def test_the_large_run_and_its_faults_run_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["--large", "--model-folder", str(tmp_path / "model"), "--output", str(tmp_path / "out")]
    assert main([*words, "--minutes", str(scaled(15.0))]) == 0
    parts = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    assert {part["part"]: part["result"] for part in parts} == {
        part["part"]: "skipped" if part["part"] == "memory" else "ok" for part in parts
    }


def test_all_of_it_runs_on_the_cpu_and_what_needs_a_gpu_is_skipped_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = main(["--output", str(tmp_path / "out"), "--minutes", str(scaled(15.0))])
    table = (tmp_path / "out" / "results.md").read_text()
    parts = {part["part"]: part for part in json.loads((tmp_path / "out" / "results.json").read_text())["parts"]}
    assert code == 0, table
    assert {name: part["result"] for name, part in parts.items()} == {
        name: "skipped" if name in NEED_A_GPU else "ok" for name in parts
    }, table
    assert all(parts[name]["reason"].startswith("no GPU: ") for name in NEED_A_GPU)
    figures = {name: part["figures"] for name, part in parts.items()}
    assert len(figures["tensor"]["publish_s"]) == 3
    assert max(figures["disk"]["logprob_distance"]) < 1e-5, "in float32 the server has the trainer's weights"
    assert 1e-5 < max(figures["tensor"]["logprob_distance"]) < 0.1, "in bfloat16 they differ by rounding"
    assert figures["ledger"]["steps_lost_or_twice"] == [0.0]
