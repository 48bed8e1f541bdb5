"""The trainer can be looked at while its weights are read: an export takes seconds, and a look must not wait for it.

And what a restore writes down of the step that it goes back to.
"""

import threading
from functools import partial
from pathlib import Path

import pytest

from actors.training.run_position import RunPosition
from actors.training.step_state import Restored
from actors.training.training import Training
from launcher.base.errors import RequestFailed
from launcher.base.messages import ServerInfo, ServerState, StepReport
from launcher.checkpoints import in_memory_checkpoints
from launcher.config.schema import ActorConfig, DatasetConfig, RunConfig, SGLangConfig
from launcher.run_files.journal import read_lines
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths
from tests.support.machine import scaled

ASSETS = Path(__file__).parents[4] / "assets" / "arithmetic"
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
