"""What a parked trainer does ahead: which settings it is of use with."""

import dataclasses
import time

import pytest

from actors.training import training as training_module
from actors.training.training import Training
from actors.training.training_parts import TrainingParts
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths
from tests.programs.supervised_run import PROMPTS, run_config


@pytest.fixture
def config(tmp_path):
    return run_config(str(tmp_path), 2, 1)


@pytest.fixture
def paths(config):
    paths = RunPaths.of(config)
    paths.prepare()
    return paths


@pytest.mark.slow
def test_what_was_loaded_with_other_settings_is_loaded_anew(config, paths, monkeypatch):
    parts = TrainingParts.load(config, Journal(paths.events, 1, time.time))
    assert (len(parts.data.prompts), parts.model.policy_version) == (PROMPTS, 0)
    smaller = dataclasses.replace(config, actor=dataclasses.replace(config.actor, eps_clip=0.1))
    loads = []
    load = TrainingParts.load

    def counted(*args, **named):
        loads.append(args[0])
        return load(*args, **named)

    monkeypatch.setattr(training_module.TrainingParts, "load", counted)
    monkeypatch.setattr(training_module, "RewardPool", lambda config, own, thread: None)
    monkeypatch.setattr(training_module.Training, "_log_to_file", lambda self: None)
    monkeypatch.setattr(training_module, "TrainingServers", _stop)
    for asked, expected in ((config, []), (smaller, [smaller])):
        loads.clear()
        with pytest.raises(Reached):
            Training(asked, paths, 1, parts=parts)
        assert loads == expected


class Reached(Exception):
    pass


def _stop(*args, **named):
    raise Reached
