"""What the memory keeps of a command's events is bounded by its repairs, and says what all of them say."""

import random

from actors.foreign.foreign_checkpoints import left_by_predecessors
from launcher.adapters.foreign_health import unproven_of, was_started
from launcher.run_files.run_memory import OF_A_COMMAND, RunMemory


def memory_of(events):
    memory = RunMemory(attempt=1, command_events=[])
    for event in events:
        memory.keep_event(event)
    return memory.command_events


def test_a_command_that_is_started_again_for_ever_does_not_fill_the_memory():
    """Each start added its lines to memory.json, which is written before each action."""
    life = ["trainer.starting", "checkpoint.found", "checkpoint.prepared", "trainer.stepped", "run.running"]
    events = [{"event": name, "attempt": 1, "time": float(number)} for number in range(1000) for name in life]
    assert memory_of(events) == events[-len(life) :]


def test_the_kept_events_answer_as_all_of_them_do():
    for seed in range(200):
        events = drawn_events(random.Random(seed))
        kept = memory_of(events)
        for ask in (unproven_of, was_started, left_by_predecessors):
            assert ask(kept) == ask(events), (seed, ask)
        assert named(kept, "trainer.starting") == named(events, "trainer.starting")[-1:]
        undoing = ("trainer.restored", "health.outside_weights")
        assert named(kept, *undoing) == named(events, *undoing), "by which the steps that stand are told"


def drawn_events(drawn):
    return [
        {
            "event": name,
            "attempt": attempt,
            "time": float(number),
            "onset_step": drawn.choice([None, 5, 9]),
            "global_step": drawn.choice([None, 3, 7]),
            "is_one_left": drawn.choice([True, False]),
            "moved": drawn.choice([None, [["a", f"b{number}"]]]),
        }
        for attempt in (1, 2)
        for number, name in enumerate(drawn.choices(sorted(OF_A_COMMAND), k=drawn.randrange(12)))
    ]


def named(some, *names):
    return [one for one in some if one["event"] in names]
