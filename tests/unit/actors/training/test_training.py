"""A trainer's parts put together: loaded ahead, looked at while its weights are read, on episodes, and its log."""

import dataclasses
import logging
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from actors.rollout.rollout_engine import Stopped
from actors.supervision.trainer_handle import waits_for
from actors.training import training as training_module
from actors.training.run_position import RunPosition
from actors.training.step_loop import Phase
from actors.training.step_state import Restored
from actors.training.training import PatientFileHandler, Training, TrainingParts
from launcher.base.errors import RequestFailed
from launcher.base.messages import ServerInfo, ServerState, StepReport, TrainerView
from launcher.checkpoints import in_memory_checkpoints
from launcher.config.schema import ActorConfig, DatasetConfig, RunConfig, SGLangConfig
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.reporting.ledger_audit import audit
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths
from tests.programs import stand_in_server
from tests.programs.supervised_run import ASSETS, PROMPTS, run_config
from tests.support.machine import scaled
from tests.support.ready_servers import ready


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


deadline_s = partial(scaled, 60.0)
NOBODY = ServerInfo(name="server-0", index=0, generation=0, state=ServerState.STALE, url="http://127.0.0.1:9")


@pytest.fixture
def training(tmp_path, monkeypatch):
    monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", tmp_path)
    config = RunConfig(
        experiment_name="locks",
        total_train_epochs=1,
        train_dataset=DatasetConfig(path=str(ASSETS / "train.jsonl"), batch_size=4),
        tokenizer_path=str(ASSETS / "model"),
        actor=ActorConfig(path=str(ASSETS / "model"), dtype="float32", device="cpu", threads=1),
        sglang=SGLangConfig(dtype="float32", device="cpu"),
    )
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    ServerKeys.make(paths.keys)
    training = Training(config, paths, attempt=1)
    yield training
    training.close()


@pytest.mark.slow
def test_a_look_does_not_wait_for_an_export(training, monkeypatch):
    exporting, may_end, seen = threading.Event(), threading.Event(), []

    def export(folder, dtype):
        exporting.set()
        assert may_end.wait(deadline_s())

    monkeypatch.setattr(training._model, "export", export)

    def send():
        with pytest.raises(RequestFailed):  # nobody is there to be sent to
            training.servers.send_weights(NOBODY, 0)
        seen.append("sent")

    sending = threading.Thread(target=send, daemon=True)
    looking = threading.Thread(target=lambda: seen.append(training.view().pid), daemon=True)
    sending.start()
    assert exporting.wait(deadline_s())
    looking.start()
    looking.join(deadline_s() / 6)
    answered = bool(seen)
    may_end.set()
    sending.join(deadline_s())
    assert answered
    assert seen[-1] == "sent"


@pytest.mark.parametrize(("attempt", "lines"), [(1, [8]), (2, [])])
def test_a_restore_writes_the_lines_that_are_missing_and_not_those_of_another_machine(training, attempt, lines):
    """Of a run that was fetched, the attempts are counted anew: a line of a later one would undo all that follow."""
    last = StepReport(
        global_step=8,
        epoch=0,
        epoch_step=8,
        attempt=attempt,
        policy_version=9,
        time=1.0,
        prompt_ids=("a",),
        weight_versions=(8,),
        rollouts_failed=0,
        rollouts_retried=0,
        metrics={"rollout/reward": 0.5},
    )
    restored = Restored(position=RunPosition(next_step=9, epoch_step=9, last_epoch_step=8), last=last)
    training._checkpointer.load_step = lambda *_: restored
    assert training.restore(8, lineage=3) == 9
    assert [line["global_step"] for line in read_lines(training._paths.ledger)] == lines
    assert training._loop._lineage == 3, "of the steps that follow"


STEPS = 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_on_episodes_are_on_tokens_of_the_trainer_s_own_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", tmp_path)
    config = run_config(str(tmp_path), STEPS, 1)
    config.rollout.episode = "tests.support.episodes.agents:two_turns"
    config.gconfig.max_new_tokens = 6
    config.reward.workers = 1
    paths = RunPaths.of(config)
    paths.prepare()
    keys = ServerKeys.make(paths.keys)
    words = ("--truthful", "--weight-version", "0", "--model-path", str(ASSETS / "model"))
    with stand_in_server.running(*words, keys=keys) as url:
        training = Training(config, paths, attempt=1)
        try:
            training.restore(FIRST_WEIGHTS, 0)
            training.servers.set_servers([ready(url, lineage=0)])
            training.allow()
            assert training.run().finished
        finally:
            training.close()
    metrics = list(read_lines(paths.metrics))
    assert len(metrics) == STEPS
    for line in metrics:
        assert line["rollout/turns/avg"] == 2.0
        assert line["rollout/segments/avg"] == 1.0
        assert line["grpo_actor/n_tokens"] == line["rollout/tokens"]  # own tokens alone
        assert line["grpo_actor/logprob_distance/max"] < 1e-4  # each at its own place behind its own context
        assert {"reward_parts/first/avg", "reward_parts/second/avg"} <= set(line)
    assert audit(list(read_lines(paths.ledger)), metrics, prompts=PROMPTS).problems == ()
    assert "and now?" in paths.samples.read_text()


def test_without_a_server_it_waits_for_one_and_is_not_hung():
    seen = []
    training = Training.__new__(Training)
    training._loop = SimpleNamespace(phase=Phase(name="train"))

    def collect(queue, *, want, weight_version):
        view = TrainerView(pid=1, is_started=True, is_running=True, is_allowed=True, phase=training._loop.phase.name)
        seen.append((waits_for(view), want, weight_version))
        raise Stopped

    training.servers = SimpleNamespace(rollouts=SimpleNamespace(collect_apart=collect))
    with pytest.raises(Stopped):
        training._replay(None, 4, 9)
    assert seen == [("a server", 4, 9)]
    assert training._loop.phase.name == "train", "the step goes on where it was"


@pytest.mark.parametrize(("lineage", "waits"), [(2, ""), (1, "a server")])
def test_a_server_with_what_a_restore_undid_is_none_to_make_rollouts(lineage, waits):
    held = ServerInfo(
        name="s0", index=0, generation=0, state=ServerState.READY, url="http://s", weight_version=7, lineage=lineage
    )
    view = TrainerView(pid=1, is_started=True, is_running=True, phase="rollout", policy_version=7, lineage=2)
    assert waits_for(replace(view, servers=(held,))) == waits


@pytest.fixture
def logs(tmp_path):
    handler = PatientFileHandler(tmp_path / "later" / "trainer.log")
    logger = logging.Logger("patient")
    logger.addHandler(handler)
    yield logger, handler, tmp_path / "later" / "trainer.log"
    handler.close()


def test_lines_that_a_disk_refused_are_counted_and_said(logs):
    logger, handler, path = logs
    logger.warning("one")
    logger.warning("two")
    assert handler.lost == 2
    path.parent.mkdir()
    logger.warning("three")
    assert handler.lost == 0
    assert path.read_text() == "three\n2 lines of this log were lost: the disk refused them\n"


def test_a_line_that_can_not_be_made_is_not_blamed_on_the_disk(logs, capsys):
    logger, handler, path = logs
    path.parent.mkdir()
    logger.warning("%d steps", "many")
    logger.warning("after")
    assert handler.lost == 0
    assert path.read_text() == "after\n"
    assert "TypeError" in capsys.readouterr().err, "a defect is shown as any other handler shows it"
