"""The picture of a storm: from the files of its run alone, with the faults that were injected into it."""

import json

import pytest

from launcher.run_files.run_paths import RunPaths
from scripts.faults.fault_paths import FaultPaths
from scripts.storm_picture import main

T0 = 1_790_000_000.0


@pytest.fixture
def paths(tmp_path):
    """A run of 20 steps, one each second."""
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    started = {"time": T0, "monotonic": 0.0, "event": "trainer.started", "attempt": 1, "prompts": 40, "total_steps": 20}
    write(paths.events, [started])
    steps = [{"global_step": s, "attempt": 1, "time": T0 + 1 + s, "rollout/reward": s / 20} for s in range(20)]
    write(paths.metrics, steps)
    write(
        paths.ledger, [{"global_step": s, "attempt": 1, "prompt_ids": [s], "weight_versions": [s]} for s in range(20)]
    )
    return paths


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def inject(paths, *kinds):
    fired = [
        {"what": "fired", "kind": kind, "target": "server-0", "monotonic": 5.0 + 3 * n} for n, kind in enumerate(kinds)
    ]
    write(FaultPaths(paths).record, fired)


@pytest.mark.slow
def test_a_storm_is_drawn_and_another_fault_is_another_picture(paths, tmp_path):
    pictures = []
    for number, kinds in enumerate((["C1"], ["C1", "T1"], ["C1", "N1"])):
        inject(paths, *kinds)
        pictures.append(tmp_path / f"{number}.png")
        assert main([str(paths.logs), "--output", str(pictures[-1])]) == 0
    contents = [picture.read_bytes() for picture in pictures]
    assert all(content.startswith(b"\x89PNG") for content in contents)
    assert len(set(contents)) == 3


def test_a_run_without_faults_is_no_storm(paths, tmp_path, capsys):
    assert main([str(paths.logs), "--output", str(tmp_path / "storm.png")]) == 2
    assert f"no fault was injected into {paths.logs}" in capsys.readouterr().err
    assert not (tmp_path / "storm.png").exists()


def test_a_picture_that_can_not_be_written_is_named(paths, tmp_path, capsys):
    inject(paths, "C1")
    assert main([str(paths.logs), "--output", str(tmp_path / "gone" / "storm.png")]) == 2
    assert "gone/storm.png was not written" in capsys.readouterr().err
