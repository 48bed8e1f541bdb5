"""Which checkpoint of AReaL's is chosen, how an export is made into what it resumes from, and how that is undone."""

import asyncio
import json
import os
import time

import pytest

from actors.foreign.foreign_checkpoints import ForeignCheckpoints
from launcher.adapters.foreign_health import Unproven, unproven_of
from launcher.adapters.trainer_adapter import adapter_of
from launcher.base.errors import RunError
from launcher.base.messages import Cause, Incident
from launcher.config.schema import RunConfig
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL, make_areal, name_of
from tests.support.worlds.adapters import trainer
from tests.support.worlds.foreign import Recorded, lines, resume_from

CONTRADICTED = """
{"time": 1795439150.3885427, "event": "trainer.starting", "attempt": 1, "reason": "…", "at_byte": 0}
{"time": 1795439276.3984100, "event": "health.reward_collapse", "attempt": 1, "subject": "policy", "onset_step": 24}
{"time": 1795439288.9498599, "event": "trainer.restored", "attempt": 1, "reason": "from …", "global_step": 19}
{"time": 1795439288.9501655, "event": "trainer.starting", "attempt": 1, "reason": "…", "at_byte": 871058}
{"time": 1795439344.7398336, "event": "health.outside_weights", "attempt": 1, "global_step": 19, "onset_step": 24}
{"time": 1795439351.0, "event": "run.errored", "attempt": 1, "reason": "…", "global_step": 20}
"""
"""Of a run of AReaL 1.0.4 whose rewards were at 0 from step 24 on, and stayed so; reasons are cut."""


def checkpoints(tmp_path, history, unproven=None, *, are_ours=True):
    config = RunConfig(experiment_name=EXPERIMENT, trial_name=TRIAL)
    config.cluster.fileroot = str(tmp_path / "runs")
    RunPaths.of(config).prepare()
    config.trainer = trainer(tmp_path)
    return ForeignCheckpoints(config, adapter_of(config.trainer), history, are_ours=are_ours, unproven=unproven)


@pytest.fixture
def history():
    return Recorded(events=[], attempts=[])


def test_after_a_crash_the_recover_folder_is_taken_although_an_export_is_newer(tmp_path, history):
    top, _ = make_areal(tmp_path / "out", [4, 14], recover_step=9)
    found = checkpoints(tmp_path, history)
    step = resume_from(found, lines(16), None)
    assert (step, found.path_of(step)) == (9, top / "default" / "recover_checkpoint")
    asyncio.run(found.prepare(step, lines(16)))
    asyncio.run(found.clear(after=step, is_condemned=False))
    aside = [path.name for path in (top / "default" / "set_aside").iterdir()]
    assert len(aside) == 1
    assert aside[0].startswith("epoch")
    assert aside[0].endswith(".superseded-1")


def test_an_export_that_its_areal_can_not_resume_from_is_neither_chosen_nor_called_damaged(tmp_path, history):
    top, info = make_areal(tmp_path / "out", [4, 14], recover_step=9)
    (info / "dataloader_info.pkl").unlink()
    found = checkpoints(tmp_path, history)
    assert resume_from(found, lines(16), None) == FIRST_WEIGHTS
    asyncio.run(found.clear(after=9, is_condemned=False))
    assert sorted(path.name for path in (top / "default").glob("epoch*")) == [str(name_of(4))]
    assert [path.name for path in (top / "default" / "set_aside").glob("*14*")] == [f"{name_of(14)}.superseded-1"]


def test_exports_that_a_run_would_write_over_from_step_0_on_are_refused(tmp_path, history):
    top, _ = make_areal(tmp_path / "out", [4, 14])
    found = checkpoints(tmp_path, history, are_ours=False)
    with pytest.raises(RunError) as caught:
        resume_from(found, [], None)
    assert str(name_of(14)) in str(caught.value)
    assert "would begin at step 0 and write over it" in str(caught.value)
    assert "another trial_name" in caught.value.hint
    assert not (top / "default" / "set_aside").exists()


@pytest.mark.slow
@pytest.mark.parametrize("has_gone_on", [False, True])
def test_from_before_an_onset_an_export_is_prepared_and_what_was_there_can_come_back(tmp_path, history, has_gone_on):
    top, info = make_areal(tmp_path / "out", [4, 9, 14], recover_step=14)
    found = checkpoints(tmp_path, history)
    incident = Incident(
        cause=Cause.REWARD_COLLAPSE, subject="reward", reason="", since=0.0, onset_step=13, is_sharp=True
    )

    async def restore():
        step = resume_from(found, lines(16), incident)
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
    if has_gone_on:
        found.unproven = Unproven(onset_step=13, restored_step=9, since=time.time() - 1)
        step = json.loads((info / "step_info.json").read_text())
        (info / "step_info.json").write_text(json.dumps(step | {"global_step": 11}))
    asyncio.run(found.put_back())
    assert step_there() == 14
    assert [one.step for one in found._adapter.checkpoints()] == [4, 9, 14, 14]
    aside = top / "default" / "set_aside"
    kept = {"recover_checkpoint.contradicted-1", "recover_info.contradicted-1"} if has_gone_on else set()
    assert {path.name for path in aside.iterdir()} == kept


@pytest.fixture
def unproven(paths):
    paths.events.write_text(CONTRADICTED.lstrip())
    return unproven_of(read_lines(paths.events))


def test_after_a_contradicted_restore_the_newest_from_before_the_onset_is_resumed_from(tmp_path, history, unproven):
    assert unproven == Unproven(onset_step=24, restored_step=19, since=1795439288.9501655)
    top, _ = make_areal(tmp_path / "out", [4, 19, 22, 24], recover_step=24)
    for path in (top / "default").glob("epoch*/**"):
        for one in (path, *path.iterdir()):
            os.utime(one, (unproven.since - 60,) * 2)
    found = checkpoints(tmp_path, history, unproven)
    assert resume_from(found, lines(26), None) == 22
    assert [line["global_step"] for line in found.proven(lines(26))][-1] == 19
    os.utime(top / "default" / str(name_of(22)))
    assert resume_from(found, lines(26), None) == 19, "22 was made by the contradicted incarnation"
    found.started()
    assert resume_from(found, lines(26), None) == 24


@pytest.mark.slow
def test_what_is_prepared_after_a_contradicted_restore_stays_where_the_trainer_looks_for_it(tmp_path, history):
    top, info = make_areal(tmp_path / "out", [4, 9, 14], recover_step=14)
    for one in top.rglob("*"):
        os.utime(one, (1e9, 1e9))
    found = checkpoints(tmp_path, history, Unproven(onset_step=13, restored_step=4, since=1.5e9))

    async def restore():
        step = resume_from(found, lines(16), None)
        await found.prepare(step, lines(16))
        await found.clear(after=step, is_condemned=False)
        return step

    assert asyncio.run(restore()) == 9
    assert json.loads((info / "step_info.json").read_text())["global_step"] == 9
    assert found.path_of(9) == top / "default" / "recover_checkpoint"
    assert [path.suffix for path in (top / "default" / "set_aside").iterdir()] == [".superseded-1"]


def test_nothing_is_begun_anew_where_none_from_before_the_onset_is_left(tmp_path, history, unproven):
    make_areal(tmp_path / "out", [], recover_step=24)
    found = checkpoints(tmp_path, history, unproven)
    with pytest.raises(RunError, match="no checkpoint is left from before step 24"):
        resume_from(found, lines(26), None)


@pytest.mark.parametrize(("is_old", "why"), [(True, "superseded"), (False, "contradicted")])
def test_what_the_next_start_passes_over_is_set_aside_and_not_as_damaged(tmp_path, history, unproven, is_old, why):
    top, _ = make_areal(tmp_path / "out", [4, 24], recover_step=9)
    if is_old:
        for one in (top / "default" / str(name_of(24)), *(top / "default" / str(name_of(24))).iterdir()):
            os.utime(one, (unproven.since - 60,) * 2)
    found = checkpoints(tmp_path, history, unproven)
    assert resume_from(found, lines(26), None) == 9
    asyncio.run(found.clear(after=9, is_condemned=False))
    assert [path.name for path in (top / "default" / "set_aside").iterdir()] == [f"{name_of(24)}.{why}-1"]
    asyncio.run(found.put_back())
    assert (top / "default" / str(name_of(24))).exists() is is_old


def test_what_a_contradicted_trainer_wrote_gives_its_place_to_what_was_there(tmp_path, history):
    top, _ = make_areal(tmp_path / "out", [4, 14], recover_step=9)
    found, own = checkpoints(tmp_path, history), top / "default" / str(name_of(14))
    resume_from(found, lines(16), None)
    asyncio.run(found.clear(after=9, is_condemned=True))
    own.mkdir()
    asyncio.run(found.put_back())
    assert (own / "config.json").exists()
    assert [path.name for path in (top / "default" / "set_aside").iterdir()] == [f"{name_of(14)}.contradicted-1"]


@pytest.mark.parametrize(("rise", "begins_anew"), [(0.0, True), (0.02, False)])
def test_from_rewards_that_known_answers_accuse_a_run_that_had_learned_nothing_begins_anew(
    tmp_path, history, rise, begins_anew
):
    make_areal(tmp_path / "out", [], recover_step=24)
    unproven = Unproven(onset_step=20, restored_step=19, since=None)
    found = checkpoints(tmp_path, history, unproven)
    seen = [{**line, "rollout/reward": 0.2 + rise * line["global_step"]} for line in lines(25)]
    if begins_anew:
        assert resume_from(found, seen, None) == FIRST_WEIGHTS
    else:
        with pytest.raises(RunError, match="no checkpoint is left from before step 20"):
            resume_from(found, seen, None)


def test_what_can_not_be_prepared_ends_the_run_with_its_reason(tmp_path, history):
    _, info = make_areal(tmp_path / "out", [4], recover_step=9)
    found = checkpoints(tmp_path, history)
    incident = Incident(
        cause=Cause.REWARD_COLLAPSE, subject="reward", reason="", since=0.0, onset_step=8, is_sharp=True
    )
    assert resume_from(found, lines(10), incident) == 4
    (info / "dataloader_info.pkl").unlink()
    with pytest.raises(RunError, match=r"could not be prepared.*dataloader_info.pkl"):
        asyncio.run(found.prepare(4, lines(10)))
