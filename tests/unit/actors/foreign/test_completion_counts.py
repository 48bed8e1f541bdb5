"""What is counted of the completions that pass the door, and what is said of them beside a fall of the rewards."""

import asyncio

import pytest

from actors.foreign.command_trainer import CommandTrainer
from actors.foreign.completion_counts import CompletionCounts, compared
from actors.foreign.fleet import DoorHandle
from actors.foreign.foreign_learning import LearningWatch
from actors.foreign.foreign_steps import ForeignSteps
from launcher.adapters.trainer_adapter import StepSeen
from launcher.base.errors import RunError
from launcher.base.messages import Cause
from launcher.config.foreign import ForeignTrainerConfig
from launcher.config.schema import RunConfig
from launcher.config.supervision import RewardHealthConfig
from launcher.run_files.journal import Journal, read_lines
from tests.support.fake_actors import FakeActor
from tests.support.run_memory import history_of


def answered(*logprobs, how="stop"):
    meta = {"finish_reason": {"type": how}, "output_token_logprobs": [[x, 7, None] for x in logprobs]}
    return {"output_ids": [7] * len(logprobs), "meta_info": meta}


def test_sums_become_figures_of_the_completions_since_and_aborted_ones_are_none():
    first = CompletionCounts().plus(answered(-1.0, -3.0))
    later = first.plus(answered(-0.5, how="length")).plus(answered(-1.5, -1.0)).plus(answered(-9.0, how="abort"))
    assert later.figures_since(first) == {
        "door/completions": 2.0,
        "door/tokens/avg": 1.5,
        "door/cut_share": 0.5,
        "door/logprob/avg": -1.0,
    }
    unscored = later.plus({"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}}})
    assert "door/logprob/avg" not in unscored.figures_since(later)
    assert later.figures_since(later) == later.figures_since(None) == {}
    assert first.figures_since(later) == {}, "the door is another one, and has begun anew"


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (8.0, "tokens 8 (8 before), mean log-prob -1.2 (-1.2 before)"),
        (1.0, "tokens 1 (8 before), mean log-prob -1.2 (-1.2 before)"),
        (None, ""),
    ],
)
def test_a_collapse_says_whether_the_completions_changed_too(paths, tokens, said):
    steps = ForeignSteps(paths, 1, list(read_lines(paths.events)))
    watch = LearningWatch(RewardHealthConfig(zero_breaker_steps=3), history_of(paths.events))
    fault = None
    for step in range(40):
        is_broken = step >= 37
        if tokens is not None:
            steps.beside = {"door/tokens/avg": tokens if is_broken else 8.0, "door/logprob/avg": -1.2}
        steps.take_step(StepSeen(step=step, reward=0.0 if is_broken else 0.6), float(step))
        fault = watch.find(steps.lines, float(step)) or fault
    steps.write()
    assert fault is not None
    assert fault.cause is Cause.REWARD_COLLAPSE
    assert fault.reason.endswith(f"; its completions meanwhile: {said}" if said else "noise 0.032)")
    assert ("its completions" in fault.reason) == bool(said)
    assert [("door/tokens/avg" in line) for line in read_lines(paths.metrics)] == [tokens is not None] * 40
    assert compared(steps.lines, 0) == ""


def test_figures_are_of_one_line_alone(paths):
    steps = ForeignSteps(paths, 1, list(read_lines(paths.events)))
    steps.beside = {"door/completions": 32.0}
    for step in (1, 2):
        steps.take_step(StepSeen(step=step), float(step))
    assert [line.get("door/completions") for line in steps.lines] == [32.0, None]


async def test_each_step_gets_what_the_door_answered_since_the_one_before_also_where_the_door_was_away(paths):
    counts = [CompletionCounts(completions=n, tokens=n * 10) for n in (0, 16, 32, 64)]

    def count():
        if (made := answers.pop(0)) is None:
            raise RunError("the door is being restarted")
        return made

    answers = [counts[0], counts[2], None, counts[2], counts[3]]
    config = RunConfig(experiment_name="counted", trainer=ForeignTrainerConfig(adapter="command", command="true"))
    config.trainer.pattern = "step (?P<step>[0-9]+)"
    journal = Journal(paths.events, 1)
    door = object.__new__(DoorHandle)
    door.actor = FakeActor(completions=count)
    door._counted = None
    history = history_of(journal.path, journal=journal)
    trainer = CommandTrainer(config, paths, 1, history, {}, changed=asyncio.Event(), door=door)
    paths.logs.mkdir(parents=True, exist_ok=True)
    for printed in ("step 1\n", "", "step 2\n", "step 3\n", "step 4\n", "step 5\n"):
        with paths.trainer_log.open("a") as log:
            log.write(printed)
        assert await trainer._take_all() is None
    lines = list(read_lines(paths.metrics))
    assert [line.get("door/completions") for line in lines] == [None, 32.0, None, None, 32.0]
