"""Any command as a trainer: what it runs, the steps in its output or file, its checkpoints, and what is refused."""

import json
import math
import os
import re
import shutil
import sys

import pytest

from launcher.adapters.command_adapter import LONGEST
from launcher.base.errors import ConfigError
from tests.support.worlds.adapters import PATTERN, adapter


def test_the_command_is_split_as_by_a_shell_and_resumed_with_the_checkpoint(tmp_path):
    made = adapter(
        tmp_path,
        command="python train.py --name 'a b'",
        python="/env/bin/python",
        env={"SEED": 3},
        checkpoints="out/step-*",
        resume="--resume=* --strict",
    )
    fresh, resumed = made.command(None), made.command(tmp_path / "out" / "step-5")
    assert fresh.words == ("/env/bin/python", "train.py", "--name", "a b")
    assert resumed.words == (*fresh.words, f"--resume={tmp_path}/out/step-5", "--strict")
    assert (fresh.cwd, fresh.variables) == (tmp_path, {"SEED": "3"})


def test_steps_of_its_output_are_read_once_however_it_is_cut(tmp_path):
    text = "hello\nstep 1 loss 2 reward 0.5\r\rstep 2 reward nan\nstep x reward 1\nstep 3 reward 0.25\nstep 4 rew"
    whole, rest = adapter(tmp_path).read(text)
    assert [(one.step, one.reward, one.nonfinite) for one in whole] == [
        (1, 0.5, ()),
        (2, None, ("reward",)),
        (3, 0.25, ()),
    ]
    assert rest == "step 4 rew"
    for cut in range(len(text)):
        first, left = adapter(tmp_path).read(text[:cut])
        second, left = adapter(tmp_path).read(left + text[cut:])
        assert ([*first, *second], left) == (whole, rest)


def test_a_pattern_is_looked_for_in_the_beginning_of_a_line_and_json_in_all_of_it(tmp_path):
    asked = []

    class Pattern:
        def search(self, line):
            asked.append(len(line))
            return re.search(PATTERN, line)

    made = adapter(tmp_path)
    made._pattern = Pattern()
    long = '"step": 1, ' * (LONGEST // 5)  # a trajectory, say: each of its steps may begin what the pattern is of
    assert [one.step for one in made.read(f"{long}\nstep 2 reward 0.5 {long}\n")[0]] == [2]
    assert asked == [LONGEST, LONGEST]
    (seen,), _ = adapter(tmp_path, pattern=None, metrics="log.jsonl").read(json.dumps({"x": long, "step": 3}) + "\n")
    assert seen.step == 3


def test_colours_of_a_terminal_hide_no_step(tmp_path):
    text = "\x1b[1mstep\x1b[0m \x1b[1;36m12\x1b[0m \x1b[33mreward \x1b[0m0.5\x1b[K\n"
    strict = r"^step (?P<step>\d+) reward (?P<reward>\S+)$"
    assert adapter(tmp_path, pattern=strict).read(text)[0] == adapter(tmp_path).read("step 12 reward 0.5\n")[0] != []
    (pair,), _ = adapter(tmp_path, pattern=r"^step (?P<step>\d+)", reward_pattern=r"^mean (?P<reward>\S+)$").read(
        "\x1b[1mstep 3\x1b[0m\n\x1b[32mmean 0.25\x1b[0m\n"
    )
    assert (pair.step, pair.reward) == (3, 0.25)


def test_a_jsonl_file_gives_steps_rewards_times_and_figures_that_are_not_finite(tmp_path):
    made = adapter(tmp_path, pattern=None, metrics="log.jsonl", reward_key="r", finite_keys=["loss"])
    lines = [
        json.dumps({"step": 7, "r": 0.5, "time": 1e9, "loss": 1}),
        '{"step": 8, "r": NaN, "loss": Infinity}',
        json.dumps({"step": 9}),
        json.dumps({"eval": 1}),
        json.dumps([1]),
        '{"step": 10, torn',
    ]
    seen, _ = made.read("\n".join(lines) + "\n")
    assert made.source == tmp_path / "log.jsonl"
    assert [(one.step, one.reward, one.at, one.nonfinite) for one in seen] == [
        (7, 0.5, 1e9, ()),
        (8, None, None, ("reward", "loss")),
        (9, None, None, ()),
    ]


def test_checkpoints_are_found_by_their_step_and_whole_with_their_last_file(tmp_path):
    made = adapter(tmp_path, checkpoints="out/step-*", checkpoint_file="done")
    for name in ("step-10", "step-9", "step-x", "set_aside/step-11"):
        (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / "step-9" / "done").touch()
    found = made.checkpoints()
    assert [(one.step, one.is_whole, one.problem) for one in found] == [
        (9, True, ""),
        (10, False, "done is not there yet"),
    ]
    assert math.isfinite(found[0].changed_at)
    assert found[0].changed_at > 0
    (undecided, _) = adapter(tmp_path, checkpoints="out/step-*").checkpoints()
    assert undecided.is_whole is None


def test_what_a_shell_would_expand_in_a_folder_is_part_of_its_name(tmp_path):
    (tmp_path / "lr=[1,2]?" / "step-5").mkdir(parents=True)
    assert [one.step for one in adapter(tmp_path, checkpoints="lr=[1,2]?/step-*").checkpoints()] == [5]


def test_a_checkpoint_that_its_trainer_removes_meanwhile_breaks_no_look_at_the_others(tmp_path, monkeypatch):
    for step in (5, 10):
        (tmp_path / "out" / f"step-{step}" / "part").mkdir(parents=True)
    scandir = os.scandir

    def removed_before(path="."):
        if str(path).endswith("step-5"):
            monkeypatch.setattr(os, "scandir", scandir)
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed_before)
    found = adapter(tmp_path, checkpoints="out/step-*").checkpoints()
    assert not (tmp_path / "out" / "step-5").exists()
    assert [one.step for one in found if one.changed_at > 0][-1:] == [10]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"command": None}, "trainer.command"),
        ({"command": "python 'x"}, "trainer.command"),
        ({"pattern": None}, "trainer.metrics"),
        ({"pattern": "step (\\d+)"}, "(?P<step>"),
        ({"pattern": "(?P<step>"}, "trainer.pattern"),
        ({"resume": "--resume *"}, "trainer.checkpoints"),
        ({"checkpoint_file": "done"}, "trainer.checkpoints"),
        ({"checkpoints": "out/last"}, "one \\* for the step"),
        ({"checkpoints": "out/step-*/actor"}, "in its last part"),
        ({"checkpoints": "/elsewhere/step-*"}, "below trainer.cwd"),
        ({"checkpoints": "out/step-*", "resume": "--resume"}, "trainer.resume"),
        ({"tracker": "out/latest"}, "trainer.checkpoints"),
        ({"checkpoints": "~/out/step-*"}, "trainer.checkpoints=~"),
        ({"metrics": "~/log.jsonl"}, "trainer.metrics=~"),
        ({"reward_pattern": "reward \\S+"}, "(?P<reward>"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(tmp_path, settings, names):
    with pytest.raises(ConfigError, match=names.replace("(?P", r"\(\?P")) as refused:
        adapter(tmp_path, **settings)
    assert refused.value.hint


def test_what_is_missing_here_is_named_with_its_setting(tmp_path):
    (tmp_path / "train.py").touch()
    assert list(adapter(tmp_path).missing()) == []
    assert list(adapter(tmp_path, python=sys.executable).missing()) == []

    def missing(**settings):
        return [str(error).partition("\n")[0] for error in adapter(tmp_path, **settings).missing()]

    assert missing(command="no-such-program --x") == ["trainer.command: no-such-program can't be run here"]
    assert missing(python="/no/python") == ["trainer.python: /no/python can't be run here"]
    assert missing(command="python other.py") == [f"trainer.command: {tmp_path}/other.py is no file"]
    assert missing(cwd=str(tmp_path / "gone")) == [f"trainer.cwd={tmp_path}/gone is no folder"]
    (tmp_path / "log").mkdir()
    assert missing(metrics="log") == [f"trainer.metrics: {tmp_path}/log is a folder"]
    assert missing(metrics="a/b/log.jsonl", pattern=None) == [f"trainer.metrics: {tmp_path}/a/b is no folder"]
