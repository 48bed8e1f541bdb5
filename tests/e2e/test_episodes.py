"""The agent with a calculator, on the real SGLang: it learns to ask, while a server, the agent and the trainer die."""

import json
import os
from statistics import fmean

import psutil
import pytest

from launcher.config.compose import REPOSITORY
from launcher.reporting.ledger_audit import audit
from launcher.run_files.journal import current_lines, read_lines
from tests.programs.supervised_run import REAL_SERVERS, SupervisedRun

ASSETS = REPOSITORY / "assets" / "calculator"
MODEL = ASSETS / "model"
STEPS = 24
SETTINGS = [
    f"train_dataset.path={ASSETS / 'train.jsonl'}",
    *(f"{key}={MODEL}" for key in ("actor.path", "ref.path", "sglang.model_path", "tokenizer_path")),
    "rollout.episode=actors.reward.calculator:solve",
    "train_dataset.batch_size=16",
    "gconfig.n_samples=8",
    "actor.optimizer.warmup_steps=5",
]


def agents(run: SupervisedRun) -> list[int]:
    """The processes of the trainer in which the user's code runs: those that play episodes, and the reward's."""
    trainer = psutil.Process(run.trainer_pids()[-1])
    return [child.pid for child in trainer.children() if any("reward_worker" in word for word in child.cmdline())]


@pytest.mark.timeout(1500)
def test_two_turns_are_learned_while_a_server_the_agent_and_the_trainer_are_killed(tmp_path):
    environment = {**os.environ, REAL_SERVERS: "1"}
    with SupervisedRun(tmp_path, steps=STEPS, servers=2, settings=SETTINGS, environment=environment) as run:
        run.wait_steps(3)
        run.kill(run.server_pids()["server-0"])
        run.wait_steps(6)
        killed = agents(run)
        run.kill(*killed)
        run.wait_steps(10)
        run.kill(run.trainer_pids()[-1])
        run.finish()
        ledger, lines = run.ledger(), list(read_lines(run.paths.metrics))
        metrics = current_lines(lines)
        prompts = run.events("trainer.started")[0]["prompts"]
        rejected = run.events("batch.rejected")
        samples = [json.loads(line) for line in run.paths.samples.read_text().splitlines()]
    assert killed
    assert len(run.trainer_pids()) == 2
    assert run.incidents()
    found = audit(ledger, lines, prompts=prompts)
    assert (found.problems, rejected) == ((), [])
    rewards = [line["rollout/reward"] for line in metrics]
    turns = [line["rollout/turns/avg"] for line in metrics]
    print("reward by step:", [round(reward, 2) for reward in rewards], "turns:", [round(one, 2) for one in turns])
    assert len(rewards) == STEPS
    assert fmean(rewards[-4:]) > fmean(rewards[:4]) + 0.2
    assert fmean(turns[-4:]) > fmean(turns[:4])
    assert any("<tool_call>" in sample["completion"] and "tool" in sample["completion"] for sample in samples)
