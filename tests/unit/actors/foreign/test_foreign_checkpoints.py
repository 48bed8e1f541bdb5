"""Which checkpoint of AReaL's is chosen, how an export is made into what it resumes from, and how that is undone."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from actors.foreign.foreign_checkpoints import ForeignCheckpoints
from launcher.adapters.trainer_adapter import adapter_of
from launcher.base.messages import Cause, Incident
from launcher.config.schema import RunConfig
from launcher.run_files.run_paths import RunPaths
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL, make_areal
from tests.unit.launcher.adapters.test_areal_adapter import trainer


class Recorded(SimpleNamespace):
    def event(self, name, **facts):
        self.events.append((name, facts))


def checkpoints(tmp_path, history):
    config = RunConfig(experiment_name=EXPERIMENT, trial_name=TRIAL)
    config.cluster.fileroot = str(tmp_path / "runs")
    RunPaths.of(config).prepare()
    config.trainer = trainer(tmp_path)
    return ForeignCheckpoints(config, adapter_of(config.trainer), history, are_ours=True)


def lines(count):
    return [{"global_step": step, "rollout/reward": 0.5, "time": 1.0 + step} for step in range(count)]


@pytest.fixture
def history():
    return Recorded(events=[], attempts=[])


def test_after_a_crash_the_recover_folder_is_taken_although_an_export_is_newer(tmp_path, history):
    top, _ = make_areal(tmp_path / "out", [4, 14], recover_step=9)
    found = checkpoints(tmp_path, history)
    step = asyncio.run(found.resume_from(lines(16), None))
    assert (step, found.path_of(step)) == (9, top / "default" / "recover_checkpoint")
    asyncio.run(found.prepare(step, lines(16)))
    asyncio.run(found.clear(after=step, is_condemned=False))
    aside = [path.name for path in (top / "default" / "set_aside").iterdir()]
    assert len(aside) == 1 and aside[0].startswith("epoch") and aside[0].endswith(".superseded-1")


@pytest.mark.slow
def test_from_before_an_onset_an_export_is_prepared_and_what_was_there_can_come_back(tmp_path, history):
    top, info = make_areal(tmp_path / "out", [4, 9, 14], recover_step=14)
    found = checkpoints(tmp_path, history)
    incident = Incident(
        cause=Cause.REWARD_COLLAPSE, subject="reward", reason="", since=0.0, onset_step=13, is_sharp=True
    )

    async def restore():
        step = await found.resume_from(lines(16), incident)
        await found.prepare(step, lines(16))
        await found.clear(after=step, is_condemned=True)
        return step

    def step_there():
        return json.loads((info / "step_info.json").read_text())["global_step"]

    assert asyncio.run(restore()) == step_there() == 9
    own = found.path_of(9)
    assert own == top / "default" / "recover_checkpoint", "which has become of step 9"
    assert found._adapter.command(own).words[-1] == "++recover.no_load_optim=true"
    assert "no optimizer" in dict(history.events)["checkpoint.prepared"]["reason"]
    asyncio.run(found.put_back())
    assert step_there() == 14
    assert [one.step for one in found._adapter.checkpoints()] == [4, 9, 14, 14]


def test_what_can_not_be_prepared_ends_the_run_with_its_reason(tmp_path, history):
    _, info = make_areal(tmp_path / "out", [4], recover_step=9)
    found = checkpoints(tmp_path, history)
    incident = Incident(
        cause=Cause.REWARD_COLLAPSE, subject="reward", reason="", since=0.0, onset_step=8, is_sharp=True
    )
    assert asyncio.run(found.resume_from(lines(10), incident)) == 4
    (info / "dataloader_info.pkl").unlink()
    with pytest.raises(Exception, match=r"could not be prepared.*dataloader_info.pkl"):
        asyncio.run(found.prepare(4, lines(10)))
