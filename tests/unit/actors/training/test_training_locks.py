"""The trainer can be looked at while its weights are read: an export takes seconds, and a look must not wait for it."""

import threading
from functools import partial
from pathlib import Path

import pytest

from actors.training.training import Training
from launcher.base.errors import RequestFailed
from launcher.base.messages import ServerInfo, ServerState
from launcher.checkpoints import in_memory_checkpoints
from launcher.config.schema import ActorConfig, DatasetConfig, RunConfig, SGLangConfig
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
