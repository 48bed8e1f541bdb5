"""The command as a process of its own, from another folder."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.machine import scaled
from tests.support.worlds.command import PYTHONPATH, QUICK

AS_INSTALLED = "import sys; del sys.path[0]; from launcher.__main__ import main; raise SystemExit(main())"
"""What the script `grpo-launcher` does: Python puts the script's own folder where the working folder was."""


def process(*arguments: str, cwd, run=("-m", "launcher"), **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *run, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": PYTHONPATH} | environment,
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )


@pytest.mark.slow
def test_as_a_process_from_another_folder(tmp_path):
    done = process(
        "conf=gsm8k_h200",
        QUICK,
        cwd=tmp_path,
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path / "hf"),
    )
    assert done.returncode == 2
    assert done.stdout == ""
    for part in ("1. a GPU with", "2. the model", "3. the data set", "nothing was started"):
        assert part in done.stderr
    said, numbered = re.search(r"(\d+) things are missing", done.stderr), re.findall(r"^(\d+)\. ", done.stderr, re.M)
    assert said is not None
    assert numbered == [str(n + 1) for n in range(int(said[1]))], "room on a small disk is missing too"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_hydras_account_of_what_was_composed(tmp_path):
    done = process("conf=gsm8k_h200", "--info", "defaults-tree", cwd=tmp_path)
    assert done.returncode == 0
    assert "conf: gsm8k_h200" in done.stdout


@pytest.mark.slow
def test_hydras_traceback_where_it_is_asked_for(tmp_path):
    done = process("conf=arithmetic_cpu", "seed=[1", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.slow
def test_a_reader_that_left_is_no_error(tmp_path):
    shell = f"{sys.executable} -m launcher conf=arithmetic_cpu --cfg job | true"
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.stderr == b""


@pytest.mark.slow
@pytest.mark.parametrize("run", [("-m", "launcher"), ("-c", AS_INSTALLED)])
def test_a_reward_function_in_the_working_folder_is_found(tmp_path, run):
    (tmp_path / "my_rewards.py").write_text("def score(completion, **others):\n    return 1.0\n")
    words = ("conf=arithmetic_cpu", "reward.fn=my_rewards:score", "dry_run=true", QUICK)
    done = process(*words, cwd=tmp_path, run=run)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_user_id_without_a_name_is_given_one(tmp_path):
    """torch and SGLang ask for it in the processes that this one starts."""
    nameless = "import pwd\ndef getpwuid(uid):\n    raise KeyError(uid)\npwd.getpwuid = getpwuid\n"
    tells = "import atexit, os\natexit.register(lambda: print(os.environ['USER']))\n"
    run = ("-c", f"{nameless}{tells}{AS_INSTALLED}")
    done = process("--version", cwd=tmp_path, run=run, USER="", LOGNAME="", LNAME="", USERNAME="")
    assert done.stdout.splitlines()[-1] == f"uid{os.getuid()}", done.stderr
