"""The ranks of a parked trainer: when they take over, when others are started, and whom each waits for."""

import errno
import os
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

from actors.processes.process_tree import process_state
from actors.ranks import rank_controller, trainer_rank
from actors.ranks.rank_controller import RankController
from actors.ranks.trainer_rank import TrainerRank
from actors.training import trainer as trainer_module
from actors.training.trainer import TRAINING, Trainer
from launcher.base.errors import TrainerError
from launcher.base.rank_location import RankLocation
from launcher.config.schema import RunConfig
from launcher.run_files.run_paths import RunPaths

BEFORE = (RankLocation(node="here", pid=11, gpus="5"),)
PARKED = (RankLocation(node="here", pid=21, gpus="5"),)


class Controller:
    """In the place of the RankController; `made` are all, `mute` the next to be asked."""

    made: ClassVar[list["Controller"]] = []
    mute = False

    def __init__(self, config, paths, journal, options, *, niceness, gpus):
        self.config = config
        self.options = options
        self.niceness = niceness
        self.gpus = gpus
        self.lost = ""
        self.where = ()
        self.calls = []
        self.made.append(self)

    def prepare(self):
        self.where = PARKED

    def begin(self, config, before):
        self.calls.append(("begin", config, before))

    def answers(self, within_s):
        return not self.mute

    def close(self):
        self.calls.append("close")


class FakeTraining:
    fails = False

    def __init__(self, config, paths, attempt, *, ask, ranks, parts):
        if self.fails:
            raise TrainerError("no model")
        self.ranks = ranks
        self.parts = parts

    def ready(self):
        return self.ranks


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    module = ModuleType(TRAINING)
    module.Training = FakeTraining
    monkeypatch.setitem(sys.modules, TRAINING, module)
    monkeypatch.setattr(trainer_module, "RankController", Controller)
    monkeypatch.setattr(trainer_module, "bind_to_cluster", lambda config: None)
    monkeypatch.setattr(trainer_module, "this_node", lambda: "here")
    monkeypatch.setattr(Controller, "made", [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = RunConfig(experiment_name="exp")
    config.cluster.fileroot = str(tmp_path)
    config.actor.dp_size = 2
    made = Trainer.__ray_metadata__.modified_class(config, RunPaths.of(config), 1, rank_options=("options",))
    made._printed = object()  # what the user's code prints is this test's
    monkeypatch.setattr(made, "_load_ahead", lambda config: SimpleNamespace(config=config, met=made._ranks))
    return made


def test_the_ranks_of_a_parked_trainer_import_as_gently_as_it_and_take_over_with_it(trainer):
    trainer.stand_by({}, "", 5, BEFORE)
    (parked,) = Controller.made
    assert (parked.options, parked.niceness, parked.gpus) == (("options",), 5, ["5"])
    assert (trainer.view().is_parked, trainer.view().ranks) == (True, PARKED)
    assert trainer.start({}, BEFORE) is parked
    assert parked.calls == [("begin", trainer._config, BEFORE)]
    assert Controller.made == [parked], "no rank is started anew"
    assert trainer._training.parts.met is parked, "what they have loaded together is used"


def test_a_parked_trainer_that_lost_a_rank_is_none_until_all_its_ranks_are_parked_anew(trainer):
    trainer.stand_by({}, "", 5, BEFORE)
    trainer.stand_by({}, "", 5, BEFORE)
    assert len(Controller.made) == 1, "one that is parked stays so"
    Controller.made[0].lost = "trainer rank 1 ended"
    assert not trainer.view().is_parked
    trainer.stand_by({}, "", 5, BEFORE)
    assert trainer.view().is_parked
    lost, new = Controller.made
    assert lost.calls == ["close"]
    assert trainer.start({}) is new
    assert trainer._training.parts.met is new


def test_ranks_that_have_loaded_with_other_settings_are_left_for_new_ones(trainer):
    """A process group can't be joined a second time."""
    trainer.stand_by({}, "", 5, BEFORE)
    cold = trainer.start({"actor.mb_spec.max_tokens_per_mb": 4096})
    assert cold is Controller.made[1]
    assert cold.config.actor.mb_spec.max_tokens_per_mb == 4096
    assert trainer._training.parts is None


def test_parked_ranks_that_do_not_answer_when_they_are_needed_are_left_for_new_ones(trainer, monkeypatch):
    trainer.stand_by({}, "", 5, BEFORE)
    monkeypatch.setattr(Controller, "mute", True)
    cold = trainer.start({}, BEFORE)
    assert Controller.made == [Controller.made[0], cold]
    assert Controller.made[0].calls == ["close"]
    assert (cold.niceness, cold.calls) == (0, [("begin", trainer._config, BEFORE)])
    assert trainer._training.parts is None


@pytest.mark.parametrize(("given", "gpus", "of_ranks"), [("", "4", ["5"]), ("2", "2", [])], ids=["none", "one"])
def test_one_that_starts_cold_has_the_gpus_of_the_trainer_that_ended_where_ray_gives_it_none(
    trainer, monkeypatch, given, gpus, of_ranks
):
    """It would see all of the node's, and take the first, which may be a server's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    trainer.__init__(trainer._config, trainer._paths, 1, rank_options=("options",))
    trainer._printed = object()
    cold = trainer.start({}, BEFORE, "4")
    assert (os.environ["CUDA_VISIBLE_DEVICES"], list(cold.gpus)) == (gpus, of_ranks)


def test_on_a_gpu_nothing_is_loaded_ahead(trainer, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    trainer.stand_by({}, "4", 5, BEFORE)
    parked = trainer.start({}, BEFORE)
    assert (Controller.made, trainer._training.parts) == ([parked], None)


def test_a_start_that_fails_leaves_no_rank(trainer, monkeypatch):
    monkeypatch.setattr(FakeTraining, "fails", True)
    with pytest.raises(TrainerError, match="no model"):
        trainer.start({})
    assert Controller.made[0].calls[-1] == "close"


def test_a_rank_begins_when_its_process_of_the_incarnation_before_is_gone(monkeypatch):
    rank = object.__new__(TrainerRank.__ray_metadata__.modified_class)
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(trainer_rank.ray, "get_runtime_context", lambda: context)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as before:
        looks = []

        def sleep(seconds):
            looks.append(process_state(before.pid)[0])
            if len(looks) == 3:
                before.kill()

        monkeypatch.setattr(trainer_rank, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
        rank._let_go(None)
        rank._let_go(RankLocation(node="there", pid=before.pid))
        assert looks == [], "of another node its pid says nothing"
        rank._let_go(RankLocation(node="here", pid=before.pid))
        assert len(looks) >= 3
        assert process_state(before.pid)[0] in ("Z", None)


def test_what_a_rank_s_disk_refuses_names_the_rank():
    """The folder that is named beside it is rank 0's, which may be well."""

    def refuse(folder):
        raise OSError(errno.ENOENT, "No such file or directory", str(folder))

    rank = object.__new__(TrainerRank.__ray_metadata__.modified_class)
    rank._rank = 3
    rank._learner = SimpleNamespace(write=refuse)
    with pytest.raises(FileNotFoundError) as refused:
        rank.ask("write", ("folder",), {})
    assert refused.value.strerror == "No such file or directory, on the node of trainer rank 3"
    assert refused.value.filename == "folder"


HALF_GONE = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_of_which_one_thread_lives_is_not_gone():
    """What they hold is given back by the last of them; the first may be a zombie long before."""
    with subprocess.Popen([sys.executable, "-c", HALF_GONE]) as process:
        while process_state(process.pid)[0] != "Z":
            time.sleep(0.01)
        assert trainer_rank._lives(process.pid)
        process.kill()
    assert not trainer_rank._lives(process.pid)


def test_a_rank_that_was_not_asked_yet_is_not_forgotten(monkeypatch):
    """Rank 0 may read its data for longer than the lease is; what was never asked holds nothing."""
    rank = object.__new__(TrainerRank.__ray_metadata__.modified_class)
    rank._rank = 1
    rank._asked_at = None
    clock = iter(range(0, 10_000, 50))
    ends = []

    def sleep(seconds):
        if next(clock) > 5 * trainer_rank.LEASE_S and rank._asked_at is None:
            rank._asked_at = 0.0

    monkeypatch.setattr(trainer_rank, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: next(clock)))
    monkeypatch.setattr(trainer_rank.os, "_exit", ends.append)
    rank._end_when_forgotten()
    assert rank._asked_at == 0.0
    assert ends == [trainer_rank.FORGOTTEN]


def test_ranks_of_which_one_was_lost_before_they_meet_do_not_wait_for_it(monkeypatch):
    """The thread that watches saw nothing to end then; the others would wait for health.trainer_first_s."""
    ranks = object.__new__(RankController)
    ranks.lost = "trainer rank 1 ended"
    ranks._before = ()
    ranks._ranks = [object()]
    ranks.where = PARKED
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(rank_controller, "ray", SimpleNamespace(get_runtime_context=lambda: context, nodes=list))
    monkeypatch.setattr(ranks, "_addresses", lambda nodes: ["127.0.0.1"] * len(nodes))
    with pytest.raises(TrainerError, match="trainer rank 1 ended"):
        ranks.meet(torch.device("cpu"))
    assert ranks._working_since is None


def test_a_process_that_does_not_end_is_not_waited_for_for_ever(monkeypatch, caplog):
    rank = object.__new__(TrainerRank.__ray_metadata__.modified_class)
    rank._rank = 1
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(trainer_rank.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(trainer_rank, "GONE_S", 0.0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as before:
        rank._let_go(RankLocation(node="here", pid=before.pid))
        before.kill()
    assert f"process {before.pid}, which was this rank, lives" in caplog.text
