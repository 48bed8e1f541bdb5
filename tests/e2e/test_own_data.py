"""docs/data_rewards_episodes.md as a user follows it: its files and its command, on the real SGLang."""

import json
import os
import re
import subprocess
import sys

import pytest

from launcher.config.compose import REPOSITORY
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths, login_name
from tests.support.machine import scaled

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PAGE = (REPOSITORY / "docs" / "data_rewards_episodes.md").read_text()
STEPS = 6
SHORT = (f"total_train_steps={STEPS}", "train_dataset.batch_size=4", "valid_dataset.max_items=8")


def block(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]


def as_chat(line):
    known = json.loads(line)
    return {"messages": [{"role": "user", "content": known["question"]}], "target": int(known["answer"].split()[-1])}


@pytest.fixture
def folder(tmp_path):
    for name, source, count in (("chats", "train", 64), ("held_out", "test", 16)):
        lines = (REPOSITORY / "assets" / "arithmetic" / f"{source}.jsonl").read_text().splitlines()[:count]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(as_chat(line)) + "\n" for line in lines))
    (tmp_path / "my_rewards.py").write_text(block("python") + "\nprint('said by the function')\n")
    return tmp_path


def launched(folder, *more, short=SHORT):
    command = [word for word in block("bash").split() if word != "\\"]
    assert command[:3] == ["python", "-m", "launcher"]
    paths = os.pathsep.join([str(REPOSITORY), str(folder)])
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, *command[1:], *short, f"cluster.fileroot={folder / 'out'}", *more],
        cwd=folder,
        env=inherited | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=scaled(500),
        check=False,
    )


def test_the_page_has_ten_lines_of_settings_and_code():
    assert len([line for line in (block("python") + block("bash")).splitlines() if line]) <= 10
    assert json.loads(block("json")) == as_chat('{"question": "60+6+8=?", "answer": "60+6=66\\n66+8=74\\n#### 74"}')


def test_the_page_is_followed(folder):
    dry = launched(folder, "dry_run=true", short=())
    assert dry.returncode == 0, dry.stdout
    assert block("text") in dry.stdout
    assert not (folder / "out").exists()

    run = launched(folder)
    assert run.returncode == 0, run.stdout
    paths = RunPaths(fileroot=folder / "out", user=login_name(), experiment_name="own_data", trial_name="trial0")
    assert len(list(read_lines(paths.ledger))) == STEPS
    steps = list(read_lines(paths.metrics))
    for step in steps:
        total = step["reward_parts/right/avg"] + 0.1 * step["reward_parts/brief/avg"]
        assert step["rollout/reward"] == pytest.approx(total)
    assert "said by the function" in paths.trainer_log.read_text().splitlines()
    assert max(step["reward_parts/right/avg"] for step in steps) > 0
    assert [event["prompts"] for event in read_lines(paths.events) if event["event"] == "eval.done"] == [8, 8]
    print("right by step:", [round(step["reward_parts/right/avg"], 3) for step in steps])
