"""TensorBoard's event files tell of a run as its log does."""

import struct
import sys

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.proto.tensor_pb2 import TensorProto

from launcher.base.errors import DataError
from launcher.diagnosis.judging.verdict import RunCondition
from launcher.diagnosis.reading.inputs import find_inputs, read_inputs
from launcher.diagnosis.reading.log_records import REWARD
from launcher.diagnosis.reading.unpacked import PackedError
from tests.support.worlds.diagnosis import diagnosis_of

REWARD_TAG = "ppo_actor/task_reward/avg"
TENSORS = {
    "content": {"dtype": 1, "tensor_content": struct.pack("<f", 0.5)},
    "float_val": {"dtype": 1, "float_val": [0.5]},
    "double_val": {"dtype": 2, "double_val": [0.5]},
}


def scalar(tag, value):
    return Summary.Value(tag=tag, simple_value=value)


def event(step, *values, at=1.79e9):
    return Event(wall_time=at + step, step=step, summary=Summary(value=values))


def event_file(path, events):
    """Without checksums: nothing reads them."""
    records = [one.SerializeToString() for one in (Event(wall_time=1.79e9, file_version="brain.Event:2"), *events)]
    path.write_bytes(b"".join(struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4) for data in records))
    return path


def steps(rewards, first=0):
    for step, reward in enumerate(rewards, start=first):
        yield event(step, scalar(REWARD_TAG, reward))
        yield event(step, scalar("ppo_actor/update/grad_norm", 0.5), scalar("rollout/reward", reward))


def read(*paths):
    return read_inputs(find_inputs(paths)).steps


@pytest.mark.parametrize("form", TENSORS)
def test_scalars_of_each_form_are_the_steps(tmp_path, form):
    """TensorBoard's own writers have used three."""
    value = Summary.Value(tag=REWARD_TAG, tensor=TensorProto(**TENSORS[form]))
    events = [event(0, value), event(1, scalar(REWARD_TAG, 0.75))]
    found = read(event_file(tmp_path / "events.out.tfevents.1790000000.host.1.0", events))
    assert found.steps.tolist() == [0, 1]
    assert found.column(REWARD).tolist() == [0.5, 0.75]


def test_a_run_s_fall_is_found_and_its_starts_are_joined(tmp_path):
    """Each start makes a file of its own; a folder has a run's."""
    healthy, noise = [0.5] * 60, np.random.default_rng(0).normal(0, 0.02, 120)
    rewards = [*(np.array([*healthy, *healthy]) + noise), *[0.0] * 30]
    event_file(tmp_path / "events.out.tfevents.1790000000.host.1.0", steps(rewards[:70]))
    event_file(tmp_path / "events.out.tfevents.1790000070.host.2.0", steps(rewards[70:], first=70))
    found = diagnosis_of(tmp_path)
    assert found.condition is RunCondition.FELL
    assert found.onset.step == 120
    assert len(found.contents.steps) == 150


def test_a_torn_end_ends_the_reading(tmp_path):
    path = event_file(tmp_path / "events.out.tfevents.1.host", steps([0.5] * 10))
    path.write_bytes(path.read_bytes()[:-20])
    assert read(path).steps.tolist() == list(range(10))
    path.write_bytes(path.read_bytes() + b"\xff" * 40)
    assert read(path).steps.tolist() == list(range(10))


def test_a_file_without_scalars_is_named(tmp_path):
    path = event_file(tmp_path / "events.out.tfevents.1.host", [])
    with pytest.raises(DataError, match="holds no scalar"):
        read(path)


def test_an_unknown_reward_is_asked_for(tmp_path):
    path = event_file(tmp_path / "renamed", [event(step, scalar("quality", 0.5)) for step in range(5)])
    with pytest.raises(DataError, match=r"has a reward that is known as one[\s\S]*quality"):
        read(path)


def test_without_tensorboardx_it_is_said_what_to_install(tmp_path, monkeypatch):
    path = event_file(tmp_path / "events.out.tfevents.1.host", steps([0.5] * 10))
    monkeypatch.setitem(sys.modules, "tensorboardX.proto.event_pb2", None)
    with pytest.raises(
        DataError, match=r"tfevents\.1\.host is TensorBoard's, and tensorboardX[\s\S]*pip install"
    ) as refused:
        read(path)
    assert isinstance(refused.value, PackedError)
