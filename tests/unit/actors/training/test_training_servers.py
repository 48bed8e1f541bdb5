"""Whom the trainer gives traffic: a server that died while it was asked is neither waited for nor brought back."""

import asyncio
import dataclasses
import errno
import os
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from actors.processes.loop_thread import LoopThread
from actors.rollout.server_pool import ServerPool
from actors.training.training_servers import PolicyServers, TrainingServers
from actors.weights.servers import Servers
from actors.weights.weight_consistency_check import GREEDY, GoldenComparison
from actors.weights.weight_folders import FolderTransport, WeightFolders
from actors.weights.weight_publisher import WeightPublisher
from launcher.base.errors import ServerError, WeightsRefused
from launcher.base.messages import ServerInfo, ServerState
from launcher.base.rollouts import Completion
from launcher.config.schema import RunConfig
from launcher.config.supervision import RestartConfig
from launcher.run_files.run_keys import ServerKeys
from tests.support.machine import scaled

deadline_s = partial(scaled, 30.0)
STALE = ServerInfo(name="server-0", index=0, generation=3, state=ServerState.STALE, url="http://gone", weight_version=7)
DEAD = dataclasses.replace(STALE, state=ServerState.DEAD)
RIGHT = Completion(token_ids=(2,), logprobs=(-0.5,), finish_reason="stop", weight_version=7, server=STALE.url)


class Trained(Servers):
    """Of a trainer whose log-probs are `own`. `generate`: what the server says to the golden prompt, and when."""

    version = 7
    compare = None

    def __init__(self, answer, asked, **config):
        config = RunConfig(experiment_name="admit", **config)
        super().__init__(config, ServerKeys(api="a", admin="b"), prompt=(1,), sampling=GREEDY)
        self.publisher = SimpleNamespace(is_loading=lambda key: False)

        async def generate(url, **how):
            asked.set()
            return await answer()

        self.client.generate = generate


class Trial(TrainingServers):
    """The part of it that admits."""

    def __init__(self, answer, own=-0.5, **config):
        self.thread = self._thread = LoopThread("rollouts")
        self._config = RunConfig(experiment_name="admit", **config)
        self.asked = threading.Event()

        async def begin():
            return Trained(answer, self.asked, **config)

        self._servers = self.thread.call(begin())
        self.pool = self._servers.pool
        self.publisher = self._servers.publisher
        self.compare = lambda server, answer: GoldenComparison(version=7, distance=abs(own + 0.5))

        async def compare(server, answer):
            return await asyncio.to_thread(self.compare, server, answer)

        self._servers.compare = compare

    def admit(self):
        return super().admit(STALE)

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
        trial.thread.call(trial._servers.client.close())
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
    trial = trials(right, known=known)
    assert trial.admit() == 0.0
    assert trial.pool.servers() == (dataclasses.replace(STALE, state=ServerState.READY),)


def test_one_that_answers_wrong_keeps_no_version(trials):
    trial = trials(right, own=-5.0)
    with pytest.raises(WeightsRefused):
        trial.admit()
    assert (trial.pool.servers()[0].state, trial.pool.servers()[0].weight_version) == (ServerState.STALE, None)


def test_one_that_could_not_be_compared_keeps_no_version(trials):
    """The trainer had no memory for its own log-probs, at each try. An admission has no budget of its own: it was tried
    for ever, and the run took no step."""
    trial = trials(right)

    def compare(server, answer):
        raise MemoryError("can't allocate 2 GiB")

    trial.compare = compare
    with pytest.raises(MemoryError):
        trial.admit()
    (known,) = trial.pool.servers()
    assert (known.state, known.weight_version) == (ServerState.STALE, None)
    assert known.reason == "it could not be compared: MemoryError: can't allocate 2 GiB"


def test_while_weights_are_published_or_sent_to_it_late_its_answers_do_not_count(trials):
    trial, seen = trials(right), []

    async def publish(version):
        seen.append(trial._servers.settled(STALE.key))

    trial.publisher.publish = publish
    trial.publish(8)
    trial.publisher.is_loading = {("server-1", 3), ("server-0", 2)}.__contains__
    seen.append(trial._servers.settled(STALE.key))
    trial.publisher.is_loading = {("server-1", 3), ("server-0", 3)}.__contains__
    assert [*seen, trial._servers.settled(STALE.key)] == [None, 7, None]


def test_one_that_begins_to_load_weights_while_it_is_admitted_gets_traffic_when_it_has_confirmed_them(trials):
    trial = trials(right)

    def then_it_loads(server, answer):
        trial.publisher.is_loading = {STALE.key}.__contains__
        return GoldenComparison(version=7, distance=0.0)

    trial.compare = then_it_loads
    assert trial.admit() == 0.0
    states = [trial.pool.servers()[0].state]
    trial.thread.call(trial.pool.confirm(STALE.key, 8))
    assert [*states, trial.pool.servers()[0].state] == [ServerState.STALE, ServerState.READY]


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


def test_at_its_end_no_weights_are_on_their_way_any_more_and_no_connection_is_open(trials):
    trial, ended = trials(right), []

    async def end():
        ended.append(not trial._servers.client._session.closed)  # what is still sent needs the connections

    trial.publisher.close = end
    trial.thread.call(trial._servers.close())
    assert ended == [True]
    assert trial._servers.client._session.closed


def test_at_its_end_no_server_is_probed_any_more(trials):
    """A probe that goes on asks over connections that are closed, and again each half second."""
    ended = []

    async def probed():
        try:
            await asyncio.Event().wait()
        finally:  # an answer that is still awaited needs the connections
            ended.append(not trial._servers.client._session.closed)

    async def nothing():
        pass

    trial = trials(probed, known=dataclasses.replace(STALE, state=ServerState.READY))
    trial.publisher.close = nothing
    trial.thread.call(trial.pool.suspect(STALE.key, "reset"))
    assert trial.asked.wait(deadline_s())
    trial.thread.call(trial._servers.close())
    assert ended == [True]


def test_at_its_end_the_folders_of_weights_go_when_nobody_reads_them_any_more(tmp_path):
    """They are in memory that outlives the process."""
    servers, closed = PolicyServers.__new__(PolicyServers), []
    servers.folders = WeightFolders(tmp_path / "weights", lambda folder: None)
    servers.folders.write(1)

    def part(name):
        async def close():
            closed.append((name, (tmp_path / "weights" / "v1").is_dir()))

        return SimpleNamespace(close=close)

    servers.publisher = part("publisher")
    servers.pool = part("pool")
    servers.client = part("client")
    asyncio.run(servers.close())
    assert closed == [("publisher", True), ("pool", True), ("client", True)]
    assert not (tmp_path / "weights").exists()


def test_weights_that_a_disk_refuses_are_waited_for_until_there_is_room_for_them(tmp_path):
    def export(folder):
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (folder / "model.safetensors").write_bytes(b"w" * 5000)

    is_full = False
    folders = WeightFolders(tmp_path / "weights", export)
    trainer = SimpleNamespace(_servers=SimpleNamespace(folders=folders), refusal=None)
    folders.write(1)
    said = "no server took weight version 2: server-0: POST: 500: [Errno 28] No space left on device"
    TrainingServers._note_refusal(trainer, WeightsRefused(said))
    assert trainer.refusal is None, "the disk of a server is not the folder of the weights"
    is_full = True
    with pytest.raises(WeightsRefused) as refused:
        folders.write(2)
    TrainingServers._note_refusal(trainer, refused.value)
    assert (trainer.refusal.path, trainer.refusal.needed) == (str(tmp_path), 5000)


# ── want of memory while weights are published ──


class Publishing:
    """A trainer with one server, which takes whatever folder it is sent. `export` writes the weights into a folder."""

    def __init__(self, tmp_path, export, lost=""):
        config = RunConfig(experiment_name="publish", restart=RestartConfig(wait_initial_s=0.01))
        self.thread = LoopThread("rollouts")
        self.pool = self.thread.call(self._pool())
        self.root = tmp_path / "weights"
        self.events = []
        folders = WeightFolders(self.root, export)
        publisher = WeightPublisher(self.pool, FolderTransport(self, folders, timeout_s=1.0), lineage=1)
        servers = SimpleNamespace(publish=publisher.publish, folders=folders)
        self.trainer = SimpleNamespace(
            _config=config,
            _thread=self.thread,
            _servers=servers,
            _model=SimpleNamespace(lost=lost),
            _journal=SimpleNamespace(record=lambda event, **facts: self.events.append((event, facts["reason"]))),
            refusal=None,
        )
        for name in ("_publish_once", "_refused", "_note_refusal"):
            setattr(self.trainer, name, partial(getattr(TrainingServers, name), self.trainer))

    async def _pool(self):
        async def probe(url):
            return None

        pool = ServerPool(probe)
        await pool.update([dataclasses.replace(STALE, state=ServerState.READY)])
        return pool

    async def update_weights_from_disk(self, url, *, path, weight_version, timeout_s):
        pass

    def publish(self, version):
        TrainingServers.publish(self.trainer, version)

    @property
    def held(self):
        return self.pool.servers()[0].weight_version


@pytest.fixture
def publishing(tmp_path):
    made = []

    def make(export, **how):
        made.append(Publishing(tmp_path, export, **how))
        return made[-1]

    yield make
    for one in made:
        one.thread.close()


class Export:
    """Fails so often with `error`, half way through its file."""

    def __init__(self, error, times):
        self.error = error
        self.times = times
        self.tries = 0

    def __call__(self, folder):
        self.tries += 1
        (folder / "model.safetensors").write_bytes(b"half")
        if self.tries <= self.times:
            raise self.error


CPU_ALLOCATION = (
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "2147483648 bytes. Error code 12 (Cannot allocate memory)"
)
WANTS = [
    MemoryError(),
    RuntimeError(CPU_ALLOCATION),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
]


@pytest.mark.parametrize("error", WANTS, ids=lambda error: type(error).__name__)
def test_want_of_memory_costs_a_publication_another_try_and_not_the_trainer(publishing, error):
    """A publication that a moment's want of memory met ended the trainer, which began anew with less memory."""
    export = Export(error, times=2)
    trainer = publishing(export)
    trainer.publish(8)
    assert (trainer.held, export.tries) == (8, 3)
    assert [event for event, _ in trainer.events] == ["weights.refused"] * 2
    assert type(error).__name__ in trainer.events[0][1]


def test_want_of_memory_that_lasts_ends_the_trainer_which_begins_with_less(publishing):
    export = Export(MemoryError(), times=99)
    trainer = publishing(export)
    with pytest.raises(MemoryError):
        trainer.publish(8)
    retries = trainer.trainer._config.restart.retry
    assert export.tries == 1 + retries
    assert len(trainer.events) == retries
    assert list(trainer.root.iterdir()) == [], "half a folder in memory would be in the way of the next trainer"


def test_another_error_is_no_want_of_memory(publishing):
    export = Export(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), times=1)
    with pytest.raises(RuntimeError, match="shapes"):
        publishing(export).publish(8)
    assert export.tries == 1


def test_lost_ranks_publish_nothing_again(publishing):
    export = Export(torch.OutOfMemoryError("CUDA out of memory."), times=1)
    with pytest.raises(torch.OutOfMemoryError):
        publishing(export, lost="trainer rank 0 failed: gather_weights").publish(8)
    assert export.tries == 1
