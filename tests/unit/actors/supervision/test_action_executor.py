"""The hands end a run whatever refuses to stop, and keep no defect of theirs from the Coordinator."""

import asyncio
import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.cluster.actor_calls import ActorAway
from actors.serving.server_report import ServerReport
from actors.supervision import action_executor
from actors.supervision.action_executor import ActionExecutor
from actors.supervision.server_handle import ServerHandle
from launcher.base.errors import CheckpointError, DataError, DiskError, ResourceError, RunError, ServerError
from launcher.base.messages import (
    Cause,
    Health,
    Incident,
    ServerInfo,
    ServerState,
    TerminalStatus,
    TrainerView,
    Verdict,
)
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.restore_request import ask_restore, read_request, withdraw_restore
from launcher.config.schema import RunConfig
from launcher.policy.actions import AdmitServer, Halt, RestoreTrainer
from launcher.policy.incident_policy import Trouble
from launcher.policy.observed import TrainerFacts
from launcher.run_files.journal import read_lines
from tests.support.bare_checkpoints import commit_files
from tests.support.fake_actors import FakeActor, never
from tests.support.run_memory import history_of
from tests.support.worlds.checkpoints import Run, steps_of

IDLE = ServerInfo(name="server-0", index=0, state=ServerState.STOPPED, generation=-1)
STOPPED = ServerReport(ordered=-1, info=IDLE)
STARTED = TrainerView(pid=1, is_started=True)
REFUSALS = [ResourceError("a port"), OSError("unforeseen"), CheckpointError("no room")]


class FakeTrainer:
    def __init__(self, view=STARTED, **does):
        self.view = view
        self._does = does

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*args, **kwargs):
            error = self._does.get(args[0] if name == "call" else name)
            if error is not None:
                raise error

        return call

    def adopt(self):
        pass

    def begin_looking(self):
        pass

    def expect(self):
        pass

    def facts(self):
        return TrainerFacts(
            verdict=Verdict(health=Health.HEALTHY, reason=""),
            is_loaded=self.view.is_loaded,
            is_paused=False,
            policy_version=30,
            lineage=1,
            next_step=30,
        )


class Trial:
    """Hands over one server slot, with the parts of the eyes that they use."""

    def __init__(self, folder, *, trainer=None, actor=None):
        self.path = folder / "events.jsonl"
        self.history = history_of(self.path)
        self.changed = asyncio.Event()
        self.slot = ServerHandle(
            "server-0",
            actor or FakeActor(),
            died=lambda end: None,
            changed=self.changed,
            setup_s=1.0,
            hung_after_s=30.0,
        )
        self.eyes = eyes = SimpleNamespace(
            changed=self.changed,
            slots={"server-0": self.slot},
            trainer=trainer or FakeTrainer(),
            monitor=None,
            catalog=SimpleNamespace(
                newest_model=lambda damaged: self.newest_model(), trial=SimpleNamespace(default=folder / "default")
            ),
            refresh=self.nothing,
            begin_looking=lambda: None,
            close=self.nothing,
            observe_run=self.observe_run,
            memory=SimpleNamespace(begin=self.nothing),
        )
        self.newest_model = lambda: None
        self.hands = ActionExecutor(RunConfig(experiment_name="hands"), self.history, eyes, shares_gpu=False)

    async def nothing(self):
        pass

    async def observe_run(self, is_stopped, with_checkpoints):
        return SimpleNamespace(is_stopped=is_stopped)

    async def begun(self):
        await self.hands.begin()
        async with asyncio.timeout(10):
            while not all(task.done() for task in self.hands._tasks._tasks):
                await asyncio.sleep(0.001)

    def events(self):
        return [event["event"] for event in read_lines(self.path)]


async def test_an_order_to_condemn_that_is_given_up_condemns_nothing_later(tmp_path):
    trial, asked, begun, goes_on = Trial(tmp_path), [], threading.Event(), threading.Event()

    def condemn_after(step, is_over):
        begun.set()
        assert goes_on.wait(60)  # the disk stalls
        asked.append(is_over())
        return ()

    trial.eyes.catalog.condemn_after = condemn_after
    order = asyncio.create_task(trial.hands._do(RestoreTrainer(global_step=1, condemn_after=3, reason="a collapse")))
    await asyncio.to_thread(begun.wait, 60)
    order.cancel()
    await asyncio.gather(order, return_exceptions=True)
    goes_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert asked == [True]


@pytest.mark.parametrize("distance", [None, 0.0])
async def test_a_server_whose_log_probs_were_compared_with_nobody_s_is_admitted_with_these_words(tmp_path, distance):
    """Alone behind the door it was READY as one that was compared is."""
    trial, info = Trial(tmp_path), dataclasses.replace(IDLE, state=ServerState.READY, generation=0)

    async def call(*_, **__):
        return distance

    trial.eyes.trainer.call = call
    trial.hands._living = lambda name: info
    facts = await trial.hands._do(AdmitServer(name="server-0"))
    assert facts["distance"] == distance
    assert ("compared with nobody's" in str(facts.get("reason"))) is (distance is None)


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
async def test_a_stop_that_fails_still_ends_the_run(tmp_path, error):
    """Else a halt would be ordered again and again, and the run never have its word."""
    trial = Trial(tmp_path, trainer=FakeTrainer(close=error), actor=FakeActor(stop=STOPPED))
    await asyncio.gather(trial.hands._do(Halt(reason="done", word=TerminalStatus.FINISHED)), return_exceptions=True)
    assert (await trial.hands.observe_run()).is_stopped


@pytest.mark.parametrize(
    ("view", "does"),
    [
        (dataclasses.replace(STARTED, is_loaded=True, is_running=True), {"pause": ActorAway("it is away")}),
        (STARTED, {}),
    ],
    ids=["it takes no order", "it died"],
)
async def test_an_abort_keeps_no_states_of_known_damage_whatever_became_of_the_trainer(tmp_path, view, does):
    """The next attempt would resume from them: they are newer than every checkpoint."""
    trial, forgotten = Trial(tmp_path, trainer=FakeTrainer(view, **does), actor=FakeActor(stop=STOPPED)), []
    fall = Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason="rewards fell", since=0.0, onset_step=25)
    trial.eyes.incident = lambda now: fall
    trial.eyes.catalog.forget_after = forgotten.append
    await trial.hands.perform(Halt(reason="ctrl-c", word=TerminalStatus.ABORTED))
    assert forgotten == [23], "a fall is seen in the step after the one that did it"
    assert (await trial.hands.observe_run()).is_stopped


async def test_a_server_without_weights_to_start_from_is_the_plans_to_mend(tmp_path):
    """It was expected, so nothing was thought of its not being there; expected for ever the run would wait for ever."""
    trial = Trial(tmp_path)

    def unreadable():
        raise CheckpointError("the folder can't be listed")

    trial.newest_model = unreadable
    await trial.begun()
    seen = trial.slot.facts(None, None, is_publishing=False)
    assert seen.state is ServerState.DEAD
    assert "can't be listed" in seen.verdict.reason
    assert "start.failed" in trial.events()


async def test_a_server_starts_from_a_checkpoint_that_the_trainer_sets_aside_meanwhile(tmp_path):
    """As when the trainer finds it damaged: a server takes far longer to read it than the trainer to move it."""
    store, read = CheckpointStore(tmp_path / "default"), []
    commit_files(store, 3, ["model.safetensors"])
    commit_files(store, 5, ["model.safetensors"])

    def start(*, model_path, weight_version, **_):
        store.set_aside_after(-1)
        read.append((Path(model_path, "model.safetensors").read_text(), weight_version))
        raise ServerError("it ends here")

    trial = Trial(tmp_path, actor=FakeActor(stop=STOPPED, start=start))
    listed = iter([store.find(5), store.find(3)])

    def newest_model():
        """The newest is moved between the look and the start."""
        found = next(listed)
        if found.global_step == 5:
            store.set_aside_after(3)
        return found

    trial.newest_model = newest_model
    await trial.begun()
    assert read == [("model.safetensors of step 3", 4)]
    assert not (tmp_path / "default" / ".start-server-0").exists()


async def test_a_defect_in_a_first_start_is_told_to_the_coordinator(tmp_path):
    trial = Trial(tmp_path)

    def defect():
        raise KeyError("a defect")

    trial.newest_model = defect
    with pytest.raises(KeyError, match="a defect"):  # as soon as it is begun, or at the next look
        await trial.begun()
        await trial.hands.observe_run()


async def test_what_the_user_wrote_wrong_ends_the_run_at_its_first_start(tmp_path):
    refused = ResourceError("port 30000 is in use", "choose another sglang.port")
    trial = Trial(
        tmp_path, trainer=FakeTrainer(TrainerView(pid=0), start=refused), actor=FakeActor(report=lambda work: never())
    )
    trial.history.started_server("server-0", 0, 0, 1)
    with pytest.raises(ResourceError, match="port 30000"):  # as soon as it is begun, or at the next look
        await trial.begun()
        await trial.hands.observe_run()


async def test_another_data_set_ends_the_run_and_no_checkpoint_is_called_damaged_for_it(tmp_path):
    other = DataError("the data set is not the checkpoint's", "set train_dataset.* as it was")
    trial = Trial(tmp_path, trainer=FakeTrainer(restore=other))
    with pytest.raises(DataError):
        await trial.hands.perform(RestoreTrainer(global_step=19, reason="the newest"))
    assert trial.history.memory.damaged_checkpoints == {}
    with pytest.raises(DataError, match="the data set is not the checkpoint's"):
        await trial.hands.observe_run()


@pytest.mark.parametrize(("subject", "incident"), [("trainer", 1), ("policy", 1), ("server-0", None)])
async def test_a_restore_tells_the_trainer_whose_repair_it_is(tmp_path, monkeypatch, subject, incident):
    """Else the trainer's own event has no incident, and the report says of each that it undid no step."""
    trial, asked = Trial(tmp_path), []

    async def restore(*args):
        asked.append(args)

    monkeypatch.setattr(trial.eyes.trainer, "restore", restore, raising=False)
    trial.history.incident_began(Trouble(cause=Cause.TRAINER_CRASH, subject=subject, reason=""), "", now=1.0)
    await trial.hands.perform(RestoreTrainer(global_step=19, reason="the newest"))
    ((step, _, told),) = asked
    assert (step, told) == (19, incident)


async def test_no_checkpoint_is_called_damaged_for_a_disk_that_does_not_give_it(tmp_path):
    trial = Trial(tmp_path, trainer=FakeTrainer(restore=DiskError("manifest.json can't be read: Input/output error")))
    with pytest.raises(DiskError):
        await trial.hands.perform(RestoreTrainer(global_step=19, reason="the newest"))
    assert trial.history.memory.damaged_checkpoints == {}


async def test_an_action_that_nobody_carries_out_is_not_recorded_as_done(tmp_path):
    class Unknown:
        name = "server-0"

    with pytest.raises(AssertionError, match="Expected code to be unreachable"):
        await Trial(tmp_path).hands.perform(Unknown())


@pytest.mark.parametrize(("onset_step", "steps"), [(25, 50), (None, None)])
async def test_a_restore_from_before_a_fall_records_how_long_the_run_is_on_probation(tmp_path, onset_step, steps):
    assert (
        await Trial(tmp_path).hands.perform(
            RestoreTrainer(global_step=19, onset_step=onset_step, reason="rewards fell")
        )
    ).get("probation_steps") == steps


# ── a person's restore ──

ASKED = RestoreTrainer(global_step=5, reason="a person asked", restore_count=1)


@pytest.fixture
def asked(tmp_path):
    """A run with checkpoints of four steps that is to go back to step 5."""
    run = Run(tmp_path / "root")
    for step in (3, 5, 7, 9):
        run.save(step)
    ask_restore(run.paths, run.store.find(5), why="by a person", condemn_after=8)
    return run


def hands_of(run, **does):
    """Of another Coordinator each time. The trainer's orders are in `loads`."""
    trial = Trial(run.paths.logs, trainer=FakeTrainer(**does))
    trial.eyes.catalog.trial = SimpleNamespace(paths=run.paths)
    trial.eyes.catalog.made_at = lambda step: (1.0,)
    trial.loads = []
    if "restore" not in does:

        async def restore(step, lineage, incident):
            trial.loads.append((step, [one.global_step for one in run.store.list()]))
            return step + 1

        trial.eyes.trainer.restore = restore
    return trial


def taken(run):
    return [event["restore_count"] for event in read_lines(run.paths.events) if event["event"] == "recovery.taken"]


async def test_a_running_run_goes_back_as_it_was_asked_and_once(asked):
    trial = hands_of(asked)
    facts = await trial.hands.perform(ASKED)
    assert (facts["global_step"], facts["next_step"]) == (5, 6)
    assert trial.loads == [(5, [3, 5])], "later ones are aside before the trainer loads"
    assert read_request(asked.paths) is None
    (event,) = (one for one in read_lines(asked.paths.events) if one["event"] == "recovery.taken")
    assert (event["reason"], event["restore_count"]) == ("by a person", 1)
    assert [name.partition(".")[2] for name in event["set_aside"]] == ["condemned-1", "superseded-1"]
    with pytest.raises(RunError, match="is done, or was taken back"):
        await trial.hands.perform(ASKED)
    assert len(trial.loads) == 1


async def test_what_was_asked_meanwhile_is_what_the_run_goes_back_to(asked):
    ask_restore(asked.paths, asked.store.find(3), why="by another", condemn_after=None)
    trial = hands_of(asked)
    assert (await trial.hands.perform(ASKED))["global_step"] == 3
    assert taken(asked) == [2]


async def test_what_was_taken_back_meanwhile_moves_nothing(asked):
    withdraw_restore(asked.paths)
    trial = hands_of(asked)
    with pytest.raises(RunError, match="taken back"):
        await trial.hands.perform(ASKED)
    assert (trial.loads, steps_of(asked.store)) == ([], [3, 5, 7, 9])


async def test_a_coordinator_that_is_killed_while_the_trainer_loads_is_carried_on_by_the_next(asked):
    with pytest.raises(asyncio.CancelledError):
        await hands_of(asked, restore=asyncio.CancelledError()).hands.perform(ASKED)
    assert read_request(asked.paths).step == 5
    trial = hands_of(asked)
    await trial.hands.perform(ASKED)
    assert (trial.loads, taken(asked), read_request(asked.paths)) == ([(5, [3, 5])], [1], None)


async def test_one_that_is_killed_before_it_removes_the_request_does_not_go_back_twice(asked, monkeypatch):
    def killed(paths):
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr(action_executor, "finish_restore", killed)
        killed_one = hands_of(asked)
        with pytest.raises(asyncio.CancelledError):
            await killed_one.hands.perform(ASKED)
    assert read_request(asked.paths).step == 5
    assert killed_one.history.memory.restore_taken == 1, "so that the next one need not even ask"
    trial = hands_of(asked)
    with pytest.raises(RunError, match="is done"):
        await trial.hands.perform(ASKED)
    assert (trial.loads, taken(asked), read_request(asked.paths)) == ([], [1], None)


@pytest.mark.parametrize("when", ["before", "by the trainer"])
async def test_one_that_is_damaged_is_refused_and_the_run_goes_on(asked, when):
    does = {}
    if when == "before":
        (asked.store.find(5).path / "model.safetensors").write_bytes(b"torn")
    else:
        does = {"restore": CheckpointError("its shapes are another model's")}
    with pytest.raises(CheckpointError):
        await hands_of(asked, **does).hands.perform(ASKED)
    assert read_request(asked.paths) is None
    assert [one["event"] for one in read_lines(asked.paths.events)].count("recovery.refused") == 1
    assert taken(asked) == []
    assert steps_of(asked.store) == ([3, 5, 7, 9] if when == "before" else [3, 5])


@pytest.mark.parametrize("error", [DiskError("it is away"), ActorAway("it died")])
async def test_what_may_pass_leaves_the_request(asked, error):
    with pytest.raises(type(error)):
        await hands_of(asked, restore=error).hands.perform(ASKED)
    assert read_request(asked.paths).step == 5
    await hands_of(asked).hands.perform(ASKED)
    assert taken(asked) == [1]
