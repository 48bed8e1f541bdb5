"""What NVML reports beside what was planned: once, by GPU, and again where it rises above the plan."""

from dataclasses import replace

import pytest

from launcher.checkpoints.model_shape import known_shape
from launcher.resources.gpus import FoundGpus, Gpu
from launcher.resources.hardware import Hardware
from launcher.resources.memory_estimate import GIB
from launcher.resources.run_plan import make_plan
from launcher.resources.seen_memory import LOOK_EVERY_S, SeenMemory
from launcher.run_files.journal import Journal, read_lines
from tests.support.composed import composed

HELD_BEFORE = 3 * GIB
H200 = Gpu(name="NVIDIA H200", memory=140 * GIB, free=140 * GIB - HELD_BEFORE)
HERE = Hardware(gpus=(H200,), cpus=16, memory=128 * GIB, memory_free=120 * GIB)
PLAN = make_plan(composed("conf=gsm8k_h200"), HERE, known_shape("Qwen/Qwen2.5-1.5B"))
PLANNED = next(place.planned for place in PLAN.places if place.gpu == 0)


class World:
    def __init__(self, tmp_path, plan=PLAN):
        self.path = tmp_path / "events.jsonl"
        self.now = 0.0
        self.found = FoundGpus(gpus=(H200,))
        self.seen = SeenMemory(
            plan, Journal(self.path, 1, lambda: 0.0), read=lambda: self.found, clock=lambda: self.now
        )

    def holds(self, share, steps):
        self.found = FoundGpus(gpus=(replace(H200, free=H200.free - int(share * PLANNED)),))
        self.look(steps)

    def look(self, steps):
        self.now += LOOK_EVERY_S
        self.seen.look_if_due(steps)

    def events(self):
        return [(event["event"], event["subject"]) for event in read_lines(self.path)]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_it_is_compared_once_by_the_most_that_was_seen_and_without_what_others_held(world):
    world.holds(1.05, steps=1)
    assert world.events() == [], "not before the allocators have grown"
    world.holds(0.6, steps=3)
    world.holds(0.6, steps=4)
    (event,) = read_lines(world.path)
    assert (event["event"], event["planned"]) == ("memory.compared", PLANNED)
    assert event["seen"] == pytest.approx(1.05 * PLANNED)
    assert "(+5%)" in event["reason"]


@pytest.mark.parametrize(
    ("share", "name"), [(1.16, "off_plan"), (0.84, "off_plan"), (1.14, "compared"), (0.86, "compared")]
)
def test_more_than_15_percent_apart_is_an_event_of_its_own(world, share, name):
    world.holds(share, steps=3)
    assert world.events() == [(f"memory.{name}", "GPU 0")]


def test_a_later_rise_above_the_plan_is_told_once(world):
    world.holds(1.0, steps=3)
    world.holds(1.2, steps=40)
    world.holds(1.3, steps=60)
    assert world.events() == [("memory.compared", "GPU 0"), ("memory.off_plan", "GPU 0")]


def test_gpus_that_cannot_be_read_are_not_compared(world):
    world.found = FoundGpus(none="GPU 0 can't be read", is_unusable=True)
    world.look(steps=5)
    assert world.events() == []
    world.holds(1.0, steps=6)
    assert world.events() == [("memory.compared", "GPU 0")]


def test_a_plan_of_another_machine_says_nothing_of_this_one(tmp_path):
    world = World(tmp_path, replace(PLAN, is_described=True))
    world.holds(2.0, steps=9)
    assert world.events() == []


def test_it_does_not_look_at_each_turn(world):
    looks = []
    world.seen._read = lambda: looks.append(0) or world.found
    for _ in range(10):
        world.seen.look_if_due(0)
    assert len(looks) == 1
