"""Whom the trainer gives traffic: a server that died while it was asked is neither waited for nor brought back."""

import asyncio
import dataclasses
import errno
import os
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from actors.processes.loop_thread import LoopThread
from actors.rollout.server_pool import ServerPool
from actors.training.training_servers import TrainingServers
from actors.weights.server_admission import ServerAdmission
from actors.weights.weight_consistency_check import GREEDY, GoldenComparison
from actors.weights.weight_folders import WeightFolders
from launcher.base.errors import ServerError, WeightsRefused
from launcher.base.messages import ServerInfo, ServerState
from launcher.base.rollouts import Completion
from launcher.config.schema import RunConfig
from tests.support.machine import scaled
from tests.support.ready_servers import nobody

deadline_s = partial(scaled, 30.0)
STALE = ServerInfo(name="server-0", index=0, generation=3, state=ServerState.STALE, url="http://gone", weight_version=7)
DEAD = dataclasses.replace(STALE, state=ServerState.DEAD)
RIGHT = Completion(token_ids=(2,), logprobs=(-0.5,), finish_reason="stop", weight_version=7, server=STALE.url)


class Trial:
    """The part of it that admits. `answer`: what the server says to the golden prompt, and when."""

    def __init__(self, answer, own=-0.5):
        self.thread = LoopThread("rollouts")
        self.pool = ServerPool(nobody)
        self._weights_lock = threading.RLock()
        self.asked = threading.Event()

        async def generate(url, **how):
            self.asked.set()
            return await answer()

        self._model = SimpleNamespace(policy_version=7)
        self._data = SimpleNamespace(golden_prompt=(1,))
        self._config = RunConfig(experiment_name="admit")
        self._thread, self._client = self.thread, SimpleNamespace(generate=generate)
        self._is_publishing, self.publisher = False, SimpleNamespace(loading=tuple)
        self.compare = lambda server, answer: GoldenComparison(version=7, distance=abs(own + 0.5))
        self.admission = ServerAdmission(
            self._client,
            self.pool,
            self._config,
            call=self.thread.call,
            prompt=(1,),
            sampling=GREEDY,
            compare=lambda server, answer: self.compare(server, answer),
            settled=self._settled,
            unchanged=self._weights_lock,
        )

    def _settled(self, name):
        return TrainingServers._settled(self, name)

    def admit(self):
        return self.admission.admit(STALE)

    def tell(self, server):
        self.thread.call(self.pool.update([server]))


@pytest.fixture
def trials():
    made = []

    def make(answer, known=STALE, **how):
        made.append(Trial(answer, **how))
        made[-1].tell(known)
        return made[-1]

    yield make
    for trial in made:
        trial.thread.close()


async def never():
    await asyncio.Event().wait()


async def right():
    return RIGHT


def test_one_that_answers_right_gets_traffic(trials):
    trial = trials(right)
    assert trial.admit() == 0.0
    assert trial.pool.servers()[0].state is ServerState.READY


@pytest.mark.parametrize("known", [DEAD, dataclasses.replace(DEAD, generation=2)])
def test_the_order_to_admit_it_says_that_it_lives(trials, known):
    """It was called dead in error, or the trainer has not heard of this life: refused, it would be tried for ever."""
    trial = trials(right, known)
    assert trial.admit() == 0.0
    assert trial.pool.servers() == (dataclasses.replace(STALE, state=ServerState.READY),)


def test_one_that_answers_wrong_keeps_no_version(trials):
    trial = trials(right, own=-5.0)
    with pytest.raises(WeightsRefused):
        trial.admit()
    assert (trial.pool.servers()[0].state, trial.pool.servers()[0].weight_version) == (ServerState.STALE, None)


def test_while_weights_are_published_or_sent_to_it_late_its_answers_do_not_count(trials):
    trial, seen = trials(right), []

    async def publish(version):
        seen.append(trial._settled("server-0"))

    trial.publisher.publish = publish
    TrainingServers.publish(trial, 8)
    trial.publisher.loading = lambda: ("server-1",)
    seen.append(trial._settled("server-0"))
    trial.publisher.loading = lambda: ("server-0", "server-1")
    assert [*seen, trial._settled("server-0")] == [None, 7, None]


def test_one_whose_machine_is_gone_is_not_waited_for(trials):
    """Until rollout.request_timeout nothing else was done with the next life of that server."""
    trial, ended = trials(never), []

    def admit():
        with pytest.raises(ServerError, match="ended before it answered"):
            trial.admit()
        ended.append(True)

    asking = threading.Thread(target=admit, daemon=True)
    asking.start()
    assert trial.asked.wait(deadline_s())
    trial.tell(DEAD)
    asking.join(deadline_s())
    assert ended
    assert trial.pool.servers() == (DEAD,)


def test_one_that_died_after_its_answer_is_not_brought_back(trials):
    trial = trials(right)

    def then_it_dies(server, answer):
        trial.tell(DEAD)
        return GoldenComparison(version=7, distance=0.0)

    trial.compare = then_it_dies
    with pytest.raises(ServerError, match="ended meanwhile"):
        trial.admit()
    assert trial.pool.servers() == (DEAD,)


def test_weights_that_a_disk_refuses_are_waited_for_until_there_is_room_for_them(tmp_path):
    def export(folder):
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (folder / "model.safetensors").write_bytes(b"w" * 5000)

    is_full = False
    trainer = SimpleNamespace(_folders=WeightFolders(tmp_path / "weights", export), refusal=None)
    trainer._folders.write(1)
    said = "no server took weight version 2: server-0: POST: 500: [Errno 28] No space left on device"
    TrainingServers._note_refusal(trainer, WeightsRefused(said))
    assert trainer.refusal is None, "the disk of a server is not the folder of the weights"
    is_full = True
    with pytest.raises(WeightsRefused) as refused:
        trainer._folders.write(2)
    TrainingServers._note_refusal(trainer, refused.value)
    assert (trainer.refusal.path, trainer.refusal.needed) == (str(tmp_path), 5000)
