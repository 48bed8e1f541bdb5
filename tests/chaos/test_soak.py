"""Left alone for long: what a run holds does not grow by the step, also where something dies every minute.

`pytest -s --long tests/chaos/test_soak.py --minutes 60`: thousands of steps of the small model on stand-in servers.
"""

import random
import signal
import time
from dataclasses import dataclass

import psutil
import pytest

from tests.programs.supervised_run import SupervisedRun
from tests.support.worlds.chaos import role_of

ENDLESS = 10**6
LOOK_S = 15.0
WARM_STEPS = 300
"""Until then libraries are loaded, pools filled and the last so many of everything kept."""
LEAST_STEPS = 4 * WARM_STEPS
"""Fewer are too few to compare a life's second half: a slow machine is left alone for longer."""
MORE_MIB, MIB_A_THOUSAND_STEPS = 16.0, 5.0
"""An allocator's to and fro, and what may be kept of each step. A leak of one batch a step is a hundred times that."""
MORE_FILES = 16
OURS = ("driver", "Trainer", "HealthMonitor", "Coordinator", "SGLangServer")
VICTIMS = ("stand-in", "stand-in", "HealthMonitor", "Coordinator", "Trainer")


@dataclass(frozen=True)
class Look:
    """`rss` in MiB; `files` are open descriptors."""

    step: int
    rss: float
    files: int
    threads: int


@pytest.mark.timeout(0)
@pytest.mark.long
@pytest.mark.parametrize("every_s", [None, 45.0], ids=["in peace", "with a fault every minute"])
def test_a_run_that_is_left_alone_holds_no_more_than_at_its_beginning(tmp_path, request, every_s):
    ends_at = time.monotonic() + 60 * request.config.getoption("--minutes")
    lives: dict[tuple[str, int], list[Look]] = {}
    draw = random.Random(7)
    settings = [f"total_train_epochs={ENDLESS}", "recover.freq_steps=20"]
    with SupervisedRun(tmp_path, steps=ENDLESS, servers=2, settings=settings) as run:
        run.wait_steps(WARM_STEPS)
        next_fault = time.monotonic() + (every_s or float("inf"))
        while time.monotonic() < ends_at or run.steps_done() < LEAST_STEPS:
            look_at(run, lives)
            if time.monotonic() > next_fault:
                next_fault += every_s * draw.uniform(0.5, 1.5)
                harm(run, draw)
            time.sleep(LOOK_S)
            assert run.process.poll() is None, f"{run.said()[-3000:]}\n{run.tail()}"
        done = run.steps_done()
        run.wait_steps(done + 1)
        run.stop()
        run.check_ledger(is_whole=False)
    compared = list(grown(lives))
    print(*compared, sep="\n")
    assert {one.role for one in compared} >= {*OURS} - ({*VICTIMS} if every_s else set()), "who was never killed"
    assert not [one for one in compared if one.is_much]
    ended = [is_mended for _, _, is_mended in run.incidents().values() if is_mended is not None]
    assert all(ended)
    assert ended or not every_s, "each fault is an incident"


@pytest.mark.parametrize(
    ("rss_per_step", "files_per_step", "is_much"),
    [(0.0, 0.0, False), (0.004, 0.0, False), (0.1, 0.0, True), (0.0, 0.1, True)],
)
def test_a_life_that_grows_by_the_step_is_seen_and_one_too_short_is_not_compared(rss_per_step, files_per_step, is_much):
    def life(steps):
        return [
            Look(step, 300 + rss_per_step * step, int(50 + files_per_step * step), 9)
            for step in range(WARM_STEPS, steps + 1, WARM_STEPS // 6)
        ]

    found = list(grown({("driver", 1): life(LEAST_STEPS), ("Trainer", 2): life(2 * WARM_STEPS)}))
    assert [(one.role, one.is_much) for one in found] == [("driver", is_much)]


def look_at(run, lives):
    step = run.steps_done()
    for process in run.family():
        try:
            if (role := role_of(process)) in OURS:
                look = Look(step, process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())
                lives.setdefault((role, process.pid), []).append(look)
        except psutil.Error:
            continue  # it ended while it was looked at


def harm(run, draw):
    role = draw.choice(VICTIMS)
    victims = [process for process in run.family() if role_of(process) == role]
    if victims:
        number = draw.choice([signal.SIGKILL, signal.SIGSTOP] if role == "stand-in" else [signal.SIGKILL])
        print(f"step {run.steps_done()}: {number.name} to {role}", flush=True)
        draw.choice(victims).send_signal(number)


@dataclass(frozen=True)
class Growth:
    role: str
    text: str
    is_much: bool

    def __str__(self):
        return f"{self.text}{': too much' if self.is_much else ''}"


def grown(lives):
    """Each life that was long enough, over the second half of it: at its beginning everything grows."""
    for (role, pid), looks in sorted(lives.items()):
        first, last = looks[len(looks) // 2], looks[-1]
        steps = last.step - first.step
        if steps < WARM_STEPS:
            continue
        allowed = MORE_MIB + MIB_A_THOUSAND_STEPS * steps / 1000
        text = (
            f"{role} ({pid}), steps {first.step} to {last.step}: {first.rss:.0f} → {last.rss:.0f} MiB, "
            f"{first.files} → {last.files} descriptors, {first.threads} → {last.threads} threads"
        )
        yield Growth(role, text, last.rss - first.rss > allowed or last.files - first.files > MORE_FILES)
