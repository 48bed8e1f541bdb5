"""Left alone for long: what a run holds does not grow by the step, also where something dies every minute.

`pytest -s --long tests/chaos/test_soak.py --minutes 60`: thousands of steps of the small model on stand-in servers.
"""

import random
import signal
import time
from dataclasses import dataclass

import psutil
import pytest

from tests.chaos.test_every_process import role_of
from tests.programs.supervised_run import SupervisedRun

pytestmark = [pytest.mark.timeout(0), pytest.mark.long]

ENDLESS = 10**6
LOOK_S = 15.0
WARM_STEPS = 300
"""Until then libraries are loaded, pools filled and the last so many of everything kept."""
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


@pytest.mark.parametrize("every_s", [None, 45.0], ids=["in peace", "with a fault every minute"])
def test_a_run_that_is_left_alone_holds_no_more_than_at_its_beginning(tmp_path, request, every_s):
    ends_at = time.monotonic() + 60 * request.config.getoption("--minutes")
    lives: dict[tuple[str, int], list[Look]] = {}
    draw = random.Random(7)
    settings = [f"total_train_epochs={ENDLESS}", "recover.freq_steps=20"]
    with SupervisedRun(tmp_path, steps=ENDLESS, servers=2, settings=settings) as run:
        run.wait_steps(WARM_STEPS)
        next_fault = time.monotonic() + (every_s or float("inf"))
        while time.monotonic() < ends_at:
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
    for life in grown(lives):
        print(life)
    assert not [life for life in grown(lives) if life.endswith("too much")]
    assert all(is_mended for _, _, is_mended in run.incidents().values() if is_mended is not None)


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


def grown(lives):
    """A line for each life that was long enough, over the second half of it: at its beginning everything grows."""
    for (role, pid), looks in sorted(lives.items()):
        first, last = looks[len(looks) // 2], looks[-1]
        steps = last.step - first.step
        if steps < WARM_STEPS:
            continue
        allowed = MORE_MIB + MIB_A_THOUSAND_STEPS * steps / 1000
        is_much = last.rss - first.rss > allowed or last.files - first.files > MORE_FILES
        yield (
            f"{role} ({pid}), steps {first.step} to {last.step}: {first.rss:.0f} → {last.rss:.0f} MiB, "
            f"{first.files} → {last.files} descriptors, {first.threads} → {last.threads} threads"
            f"{': too much' if is_much else ''}"
        )
