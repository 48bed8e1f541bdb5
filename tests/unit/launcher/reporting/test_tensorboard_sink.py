"""TensorBoard: its files hold what metrics.jsonl has, across restores; no disk makes a run wait or end."""

import sys

import pytest

from launcher.cli.run_screen import Screen
from launcher.config.compose import compose
from launcher.diagnosis.reading.log_records import REWARD, FigureNames
from launcher.diagnosis.reading.tensorboard_files import read_event_file
from launcher.reporting.tensorboard_sink import TensorBoardSink
from launcher.resources.missing_machine import missing_writer
from tests.support.composed import composed
from tests.support.worlds.reporting import NOW


def line(step, reward):
    return {"global_step": step, "attempt": 1, "time": 1.8e9, "rollout/reward": reward, "grpo_actor/lr": 1e-4}


def files_of(folder):
    return sorted(folder.glob("events.out.tfevents.*"), key=lambda path: int(path.suffix[1:]))


def steps_of(file):
    found = read_event_file(file, FigureNames(""))
    rewards = found.steps.column(REWARD).tolist()
    return {step: reward for step, reward in zip(found.steps.steps.tolist(), rewards, strict=True) if reward == reward}


def dropped_from(file):
    """The step of the file's first event but one, where that begins a session; None where it is an ordinary one."""
    events = pytest.importorskip("tensorboardX.proto.event_pb2")
    data = file.read_bytes()
    first = 16 + int.from_bytes(data[:8], "little")
    length = int.from_bytes(data[first : first + 8], "little")
    event = events.Event.FromString(data[first + 12 : first + 12 + length])
    return event.step if event.session_log.status == events.SessionLog.START else None


def written(paths, folder, lines):
    pytest.importorskip("tensorboardX")
    said = []
    sink = TensorBoardSink(str(folder), paths, say=said.append)
    for values in lines:
        sink.log(values)
    sink.finish()
    return sink, said


def test_figures_are_those_of_the_run_and_a_restore_drops_what_it_undid(paths, tmp_path):
    late = {"global_step": 0, "eval/sampled": 0.5}
    lines = [line(0, 0.1), line(1, 0.2), late, line(2, float("nan")), line(1, 0.25), line(2, 0.3)]
    sink, said = written(paths, tmp_path / "tb", lines)
    assert (sink.missed, said, sink.folder) == (0, [], tmp_path / "tb" / "exp" / "t0")
    first, second = files_of(sink.folder)
    assert steps_of(first) == pytest.approx({0: 0.1, 1: 0.2})
    assert steps_of(second) == pytest.approx({1: 0.25, 2: 0.3})
    assert (dropped_from(first), dropped_from(second)) == (0, 1)
    assert {"eval/sampled", "grpo_actor/lr", "rollout/reward"} == {*read_event_file(first, FigureNames("")).keys}


def test_what_the_disk_refuses_is_said_once_and_counted(paths, tmp_path):
    (tmp_path / "tb").write_text("a file, no folder")
    sink, said = written(paths, tmp_path / "tb", [line(step, 0.5) for step in range(3)])
    assert sink.missed == 3
    assert len(said) == 1
    assert "TensorBoard misses steps: " in said[0]
    assert str(tmp_path / "tb") in said[0]


def test_without_the_package_it_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert list(missing_writer(composed("conf=arithmetic_cpu"))) == []
    (error,) = missing_writer(composed("conf=arithmetic_cpu", "stats_logger.tensorboard.path=runs"))
    assert str(error) == (
        "stats_logger.tensorboard.path=runs needs tensorboardX, which is not installed\n"
        '  → pip install -c constraints.txt -e ".[tensorboard]"'
    )


def test_a_file_in_the_place_of_its_folder_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "runs").touch()
    (error,) = missing_writer(compose(["conf=arithmetic_cpu", f"stats_logger.tensorboard.path={tmp_path / 'runs'}"]))
    assert str(error).endswith("runs is a file\n  → name a folder")


def test_off_it_imports_nothing_and_makes_no_folder(paths):
    sink = TensorBoardSink(None, paths, say=print)
    sink.log(line(0, 0.5))
    sink.finish()
    assert sink.folder is None
    assert sink.missed == 0


def test_the_screen_of_a_run_gives_it_each_step(paths, tmp_path):
    pytest.importorskip("tensorboardX")
    config = compose(["conf=arithmetic_cpu", f"stats_logger.tensorboard.path={tmp_path}/tb"])
    with (tmp_path / "screen").open("w") as out, Screen(config, paths, out) as screen:
        screen.begin(1)
        screen.show(NOW, [line(0, 0.75)])
    (file,) = files_of(tmp_path / "tb" / "exp" / "t0")
    assert steps_of(file) == {0: 0.75}
