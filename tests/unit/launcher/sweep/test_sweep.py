"""A sweep over fake trials, as a process: what each end comes to, what is run again, and how it is ended."""

import csv
import os
import signal
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest

from launcher.config.compose import REPOSITORY
from tests.programs.fake_trial import CRASHES, HALTS, OUT_OF_MEMORY, REFUSED, WAITS
from tests.support.machine import scaled, wait_until

pytestmark = pytest.mark.slow

deadline_s = partial(scaled, 60)


class Sweep:
    """`python -m tests.programs.fake_trial -m …` in a folder of its own; as often as it is called."""

    def __init__(self, folder):
        self.folder = folder
        self.started: list[subprocess.Popen] = []

    def start(self, *values: object, **more: object) -> subprocess.Popen:
        arguments = ["conf=arithmetic_cpu", f"cluster.fileroot={self.folder}", "sweep.parallel=1"]
        arguments += [f"sglang.max_total_tokens={','.join(map(str, values))}"]
        arguments += [f"{key.replace('__', '.')}={value}" for key, value in more.items()]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.programs.fake_trial", "-m", *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *values: object, **more: object) -> tuple[int, str]:
        process = self.start(*values, **more)
        said, _ = process.communicate(timeout=deadline_s())
        return process.returncode, said

    def lives(self, what: str = "started") -> list[tuple[int, int]]:
        """(tokens, pid) of each."""
        file = self.folder / "lives.txt"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(tokens), int(pid)) for word, tokens, pid in lines if word == what]

    def counts(self, what: str = "started") -> Counter[int]:
        return Counter(tokens for tokens, _ in self.lives(what))

    def rows(self) -> dict[str, dict[str, str]]:
        (file,) = self.folder.glob("sweeps/*/*/*/sweep.csv")
        with file.open() as lines:
            return {row["sglang.max_total_tokens"]: row for row in csv.DictReader(lines)}


@pytest.fixture
def sweep(tmp_path):
    made = Sweep(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


def lives_on(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_end_of_a_trial_is_its_own_and_only_what_has_no_word_is_run_again(sweep):
    values = (1000, 2000, OUT_OF_MEMORY, REFUSED, CRASHES, HALTS, "many")
    code, said = sweep.run(*values)
    assert code == 0, said
    ends = {tokens: (row["ended"], row["cause"]) for tokens, row in sweep.rows().items()}
    assert ends == {
        "1000": ("FINISHED", ""),
        "2000": ("FINISHED", ""),
        str(OUT_OF_MEMORY): ("ERRORED", "server_oom"),
        str(REFUSED): ("REFUSED", ""),
        str(CRASHES): ("CUT OFF", ""),
        str(HALTS): ("ERRORED", "server_crash"),
        "many": ("REFUSED", ""),
    }
    assert "sglang.max_total_tokens=many: of type int or null, allowed: at least 1" in sweep.rows()["many"]["reason"]
    assert sweep.rows()[str(REFUSED)]["reason"] == "memory: host memory: 9 GiB are planned"
    assert "exit code 1: Segmentation fault" in sweep.rows()[str(CRASHES)]["reason"]
    assert "recommended: sglang.max_total_tokens=1000" in said

    code, said = sweep.run(*values, 500)
    assert code == 0
    assert sweep.counts() == {1000: 1, 2000: 1, OUT_OF_MEMORY: 1, CRASHES: 2, HALTS: 1, 500: 1}
    assert "sglang.max_total_tokens=20000: already ERRORED: server_oom" in said
    assert "recommended: sglang.max_total_tokens=500" in said


def test_ctrl_c_ends_all_and_each_trial_hears_it_once(sweep):
    process = sweep.start(WAITS, 1000)
    wait_until(sweep.lives)
    code, said = sweep.run(WAITS, 1000)
    assert (code, "this sweep is running already" in said) == (2, True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all in its foreground
    said, _ = process.communicate(timeout=deadline_s())
    assert process.returncode == 130
    assert sweep.lives("interrupted") == sweep.lives("started")
    assert len(sweep.lives()) == 1
    assert sweep.rows()[str(WAITS)]["ended"] == "CUT OFF"
    assert sweep.rows()["1000"]["ended"] == "NOT RUN"
    assert "ended by the user" in said


def test_a_killed_sweep_leaves_no_trial_and_the_next_goes_on(sweep):
    process = sweep.start(1000, WAITS, WAITS + 1, 2000, sweep__parallel=2)
    wait_until(lambda: sweep.counts()[WAITS] and sweep.counts()[WAITS + 1])  # two side by side
    process.kill()
    process.wait()
    wait_until(lambda: not any(lives_on(pid) for _, pid in sweep.lives()))
    assert sweep.counts("interrupted") == {WAITS: 1, WAITS + 1: 1}
    (sweep.folder / "go").touch()
    code, said = sweep.run(1000, WAITS, WAITS + 1, 2000)
    assert code == 0, said
    assert sweep.counts() == {1000: 1, WAITS: 2, WAITS + 1: 2, 2000: 1}
    assert {row["ended"] for row in sweep.rows().values()} == {"FINISHED"}
