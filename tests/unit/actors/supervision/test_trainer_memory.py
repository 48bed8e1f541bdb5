"""Where a trainer's memory ran out: while it steps, while it loads, or so that the kernel or Ray ended it."""

import asyncio
from pathlib import Path

import pytest
from ray.exceptions import RayActorError, RayTaskError

from actors.supervision import trainer_handle
from actors.supervision.trainer_handle import ProcessId, TrainerHandle
from launcher.base.errors import LauncherError
from launcher.base.messages import Cause, Health, LoopFailure, TrainerView
from launcher.config.supervision import HealthConfig
from launcher.policy.exit_cause import RanOut
from launcher.policy.memory_backoff import Lengths
from launcher.resources import hardware

ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"


class Call:
    """A remote method that answers with what it is given, again and again; an exception is raised."""

    def __init__(self, value):
        self.value = value

    def remote(self, *_):
        async def say():
            if isinstance(self.value, Exception):
                raise self.value
            return self.value

        return say()


class Actor:
    def __init__(self, **answers):
        for name, value in answers.items():
            setattr(self, name, Call(value))


def link(actor, log=Path("no such log")):
    return TrainerHandle(actor, ended=lambda reason: None, changed=asyncio.Event(), health=HealthConfig(), log=log)


def facts_after(actor, work=None, **settings):
    async def scenario():
        trainer = link(actor, **settings)
        await trainer.probe.refresh()
        if work is not None:
            await work(trainer)
        facts = trainer.facts()
        await trainer.close()
        return facts

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("kind", "message", "ran_out"),
    [
        ("RuntimeError", ALLOCATOR, RanOut.TRAINER_HOST),
        ("MemoryError", "", RanOut.TRAINER_HOST),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", RanOut.TRAINER_DEVICE),
    ],
)
def test_a_step_that_found_no_memory(kind, message, ran_out):
    failure = LoopFailure(kind=kind, message=message, global_step=3)
    facts = facts_after(Actor(view=TrainerView(pid=1, is_started=True, is_loaded=True, failure=failure)))
    assert (facts.verdict.health, facts.verdict.cause, facts.ran_out) == (Health.DEAD, Cause.TRAINER_OOM, ran_out)


@pytest.mark.parametrize(
    "said", ["CUDA out of memory. Tried to allocate 2.00 GiB.", "[Errno 28] No space left on device"]
)
def test_what_a_server_said_to_each_try_is_not_the_trainers(said):
    """Its micro-batches were halved, and that was remembered for the machine."""
    message = f"prompt p1 failed 3 times in one step, last: POST http://127.0.0.1:30000/generate: HTTP 500 {said}"
    failure = LoopFailure(kind="RolloutError", message=message, global_step=3)
    facts = facts_after(Actor(view=TrainerView(pid=1, is_started=True, is_loaded=True, failure=failure)))
    assert (facts.verdict.health, facts.verdict.cause, facts.ran_out) == (Health.DEAD, Cause.TRAINER_CRASH, None)
    assert said in facts.verdict.reason


def test_a_start_that_found_no_memory():
    failed = RayTaskError("start", "…", RuntimeError(ALLOCATOR), pid=1, ip="127.0.0.1")
    failed.cause = RuntimeError(ALLOCATOR)

    async def start(trainer):
        with pytest.raises(LauncherError):
            await trainer.start({})

    facts = facts_after(Actor(view=TrainerView(pid=1), start=failed), start)
    assert (facts.verdict.cause, facts.ran_out) == (Cause.TRAINER_OOM, RanOut.TRAINER_HOST)


def test_a_process_that_ray_ended_for_want_of_memory():
    said = "The actor died unexpectedly.\nTask was killed due to the node running low on memory.\n"

    async def run(trainer):
        await trainer.resume()
        await trainer._run

    answers = {"allow": None, "run": RayActorError(None, said), "view": TrainerView(pid=1)}
    facts = facts_after(Actor(**answers), run)
    assert (facts.verdict.cause, facts.ran_out) == (Cause.TRAINER_OOM, RanOut.TRAINER_HOST)


@pytest.mark.parametrize(("kills", "ran_out"), [((0, 1), RanOut.TRAINER_HOST), ((1, 1), None)])
def test_a_process_that_the_kernel_killed_for_want_of_memory(monkeypatch, kills, ran_out):
    before, after = kills
    count = [before]
    monkeypatch.setattr(hardware, "oom_kills", lambda pid=None: ("vmstat", count[0]))
    monkeypatch.setattr(hardware, "oom_kills_in", lambda file: count[0])

    async def ended(pid):
        count[0] = after
        return True

    monkeypatch.setattr(trainer_handle, "process_ended", ended)

    async def wait(trainer):
        await trainer._wait_end(ProcessId("", 1))

    facts = facts_after(Actor(view=TrainerView(pid=1, is_started=True)), wait)
    assert facts.verdict.health is Health.DEAD
    assert facts.ran_out is ran_out
    assert facts.verdict.cause is (Cause.TRAINER_OOM if ran_out else Cause.TRAINER_CRASH)


@pytest.mark.parametrize("when", ["before it was found sound", "since"])
def test_a_process_that_found_no_memory_to_say_so_but_in_its_log(monkeypatch, tmp_path, when):
    """A thread of Ray's meets the same want of memory, and ends the process before anybody is told of the step."""
    log = tmp_path / "trainer.log"
    words = f"2026-11-21 15:11:43 trainer ERROR: the step loop ended with an error\nRuntimeError: {ALLOCATOR}\n"
    log.write_text("step 2\n" + (words if when != "since" else ""))

    async def ended(pid):
        return True

    monkeypatch.setattr(trainer_handle, "process_ended", ended)

    async def wait(trainer):
        with log.open("a") as file:
            file.write(words if when == "since" else "step 3\n")
        await trainer._wait_end(ProcessId("", 1))

    facts = facts_after(Actor(view=TrainerView(pid=1, is_started=True)), wait, log=log)
    assert facts.verdict.health is Health.DEAD
    assert facts.verdict.cause is (Cause.TRAINER_OOM if when == "since" else Cause.TRAINER_CRASH)


async def test_what_it_said_of_its_data_outlives_its_process():
    actor = Actor(view=TrainerView(pid=1, is_started=True, longest_sequence=42, largest_micro_batch=5376))
    trainer = link(actor)
    await trainer.probe.refresh()
    actor.view = Call(TrainerView(pid=2))
    await trainer.probe.refresh()
    await trainer.close()
    assert (trainer.view.pid, trainer.lengths) == (2, Lengths(longest_sequence=42, largest_micro_batch=5376))


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("1 worker(s) were killed due to the node running low on memory. Memory on the node was", Cause.TRAINER_OOM),
        ("", Cause.TRAINER_CRASH),
    ],
)
def test_a_process_of_which_ray_says_only_elsewhere_that_it_ended_it_for_memory(monkeypatch, said, cause):
    """An actor that may restart: its caller hears of a restart, and the reason is in Ray's store."""
    asked = []

    async def ended(pid):
        return True

    async def words(node, pid):
        asked.append((node, pid))
        return said

    monkeypatch.setattr(trainer_handle, "process_ended", ended)
    monkeypatch.setattr(trainer_handle, "killed_for_memory", words)

    async def wait(trainer):
        await trainer._wait_end(ProcessId("", 1))

    facts = facts_after(Actor(view=TrainerView(pid=1, is_started=True)), wait)
    assert (facts.verdict.health, facts.verdict.cause) == (Health.DEAD, cause)
    assert ("", 1) in asked
