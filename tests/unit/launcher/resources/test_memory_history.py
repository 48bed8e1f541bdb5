"""What gave way is kept for the host and the configuration, and for nobody else."""

import dataclasses
import json

import pytest

from launcher.base.errors import StorageError
from launcher.config.schema import RunConfig
from launcher.policy.exit_cause import RanOut
from launcher.policy.memory_backoff import KINDS, POOL_TOKENS, MemorySettings, TriedSettings, with_overrides
from launcher.resources.gpus import Gpu
from launcher.resources.hardware import Hardware
from launcher.resources.memory_history import MemoryHistory, RememberedSettings, device

HERE = Hardware(gpus=(), cpus=2, memory=24 * 2**30, memory_free=2**30)
H200 = Gpu(name="NVIDIA H200", memory=141 * 2**30, free=0)


def config(**sglang):
    made = RunConfig(experiment_name="x")
    made.actor.path = "model"
    for key, value in sglang.items():
        setattr(made.sglang, key, value)
    return made


def book(tmp_path, made=None, hardware=HERE):
    return MemoryHistory.of(made or config(max_total_tokens=20000), tmp_path, hardware)


SETTINGS = MemorySettings.of(config(max_total_tokens=20000), longest_sequence=40, on_gpu=False, shares_gpu=False)
KEPT = RememberedSettings(
    overrides={POOL_TOKENS: 10000}, tried=(TriedSettings(ran_out=RanOut.SERVER_HOST, settings=SETTINGS),)
)


def test_what_is_kept_is_read_again(tmp_path):
    assert book(tmp_path).read() is None
    book(tmp_path).keep(KEPT, by="x/trial0")
    assert book(tmp_path).read() == KEPT
    assert json.loads(book(tmp_path).path.read_text())["by"] == "x/trial0", "a person sees whose it is"


def test_another_configuration_model_or_machine_begins_anew(tmp_path):
    book(tmp_path).keep(KEPT, by="x/trial0")
    other_model = config(max_total_tokens=20000)
    other_model.actor.path = "larger"
    on_gpu = dataclasses.replace(HERE, gpus=(H200,))
    more_memory = dataclasses.replace(HERE, memory=48 * 2**30)
    assert book(tmp_path, config(max_total_tokens=30000)).read() is None
    assert book(tmp_path, other_model).read() is None
    assert book(tmp_path, hardware=on_gpu).read() is None
    assert book(tmp_path, hardware=more_memory).read() is None


def test_another_trial_of_the_same_settings_knows_it_too(tmp_path):
    book(tmp_path).keep(KEPT, by="x/trial0")
    other = config(max_total_tokens=20000)
    other.trial_name = "trial1"
    other.actor.optimizer.lr = 1e-6
    assert book(tmp_path, other).read() == KEPT


def test_the_device_is_named_with_its_memory():
    assert device(HERE) == "cpu 24 GiB"
    assert device(dataclasses.replace(HERE, gpus=(H200, H200))) == "NVIDIA H200 141 GiB, NVIDIA H200 141 GiB"


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"format": 2, "overrides": {}, "tried": []}',
        '{"format": 1, "overrides": {"sglang.max_total_tokens": -5}, "tried": []}',
        '{"format": 1, "overrides": {"sglang.max_total_tokens": "10000"}, "tried": []}',
        '{"format": 1, "overrides": {"sglang.mem_fraction_static": 7.0}, "tried": []}',
        '{"format": 1, "overrides": {"actor.optimizer.lr": 1.0}, "tried": []}',
        '{"format": 1, "overrides": {}, "tried": [{"ran_out": "somewhere", "settings": {}}]}',
        '{"format": 1, "overrides": {}, "tried": 3}',
    ],
)
def test_a_damaged_book_is_named(tmp_path, content):
    damaged = book(tmp_path)
    damaged.path.parent.mkdir(parents=True)
    damaged.path.write_text(content)
    with pytest.raises(StorageError, match=rf"{damaged.path} can't be used"):
        damaged.read()
    damaged.keep(KEPT, by="x/trial0")
    assert damaged.read() == KEPT


def test_a_book_that_can_not_be_written_says_what_follows(tmp_path):
    (tmp_path / "memory").write_text("in the way")
    with pytest.raises(StorageError, match=r"can't be written.*\n?.*cluster\.fileroot"):
        book(tmp_path).keep(KEPT, by="x/trial0")


def test_every_setting_of_the_ladder_has_its_kind():
    values = {int: 5, float: 0.5, bool: True}
    changed = with_overrides(config(), {key: values[kind] for key, kind in KINDS.items()})
    assert changed.gconfig.n_samples == 5
    assert changed.sglang.mem_fraction_static == 0.5
