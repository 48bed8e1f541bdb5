"""A run's further attempts have the settings that it began with, to the last one."""

import dataclasses

import pytest
import yaml

from launcher.base.errors import StorageError
from launcher.cli.run_screen import write_config
from launcher.config.compose import compose
from launcher.config.retired import RETIRED
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_config
from tests.support.composed import composed

FURTHER = ("+train_datasets.code.path=code.jsonl", "+valid_datasets.hard.path=hard.jsonl")
ODD = (
    "reward.fn=[a:b,c:d]",
    "reward.weights=[0.1,1e-30]",
    "+trainer.env.A='\\${B}'",
    "+chat.template_kwargs.x=[1,null]",
)


@pytest.mark.parametrize(
    "overrides",
    [["conf=arithmetic_cpu", *FURTHER], ["conf=gsm8k_h200"], ["conf=arithmetic_tool_cpu", *ODD[1:]], ["conf=trl"]],
    ids=lambda overrides: overrides[0],
)
def test_what_is_read_is_what_was_written(tmp_path, overrides):
    config = compose([*overrides, f"cluster.fileroot={tmp_path}"])
    paths = RunPaths.of(config)
    paths.prepare()
    file = write_config(dataclasses.asdict(config), paths, 1)
    assert read_config(file) == config
    other = write_config(dataclasses.asdict(config) | {"seed": 77}, paths, 2)
    assert (other.name, read_config(other).seed) == ("config.attempt2.yaml", 77)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: data.pop("seed"), "it lacks seed"),
        (lambda data: data["actor"].pop("path"), "it lacks path"),
        (lambda data: data["actor"].update(nonsense=1), "nonsense"),
        (lambda data: data.update(actor=None), "can't be read"),
    ],
)
def test_what_this_program_has_not_written_is_one_message_that_names_the_file(tmp_path, spoil, said):
    data = dataclasses.asdict(composed("conf=arithmetic_cpu"))
    spoil(data)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(StorageError, match=f"config.yaml, the settings of this run, can't be read.*{said}|{said}"):
        read_config(file)
    file.unlink()
    with pytest.raises(StorageError, match="No such file"):
        read_config(file)


def test_a_file_of_an_earlier_version_has_settings_that_have_gone(tmp_path):
    config = composed("conf=arithmetic_cpu")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(dataclasses.asdict(config) | {next(one for one in RETIRED if "." not in one): 1}))
    assert read_config(file) == config
