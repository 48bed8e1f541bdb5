"""The agent with a calculator on the real SGLang, while a server, the processes of the agent and the trainer die."""

import json
import os
import re

import pytest

from launcher.config.compose import REPOSITORY
from launcher.run_files.journal import current_lines, read_lines
from scripts.check_ledger import audited_facts
from tests.programs.supervised_run import REAL_SERVERS, SupervisedRun
from tests.support.worlds.chaos import role_of

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

ASSETS = REPOSITORY / "assets" / "calculator"
STEPS = 8
SETTINGS = [
    f"train_dataset.path={ASSETS / 'train.jsonl'}",
    *(f"{key}={ASSETS / 'model'}" for key in ("actor.path", "ref.path", "sglang.model_path", "tokenizer_path")),
    "rollout.episode=actors.reward.calculator:solve",
    "train_dataset.batch_size=4",
    "train_dataset.max_items=16",  # two epochs
    "gconfig.n_samples=4",
]


def test_a_server_the_agent_and_the_trainer_are_killed_and_no_prompt_is_lost(tmp_path):
    environment = os.environ | {REAL_SERVERS: "1"}
    with SupervisedRun(tmp_path, steps=STEPS, servers=2, settings=SETTINGS, environment=environment) as run:
        run.wait_steps(2)
        run.kill(run.server_pids()["server-0"])
        run.wait_steps(run.steps_done() + 1)
        agents = [process.pid for process in run.family() if role_of(process) == "reward worker"]
        run.kill(*agents)
        run.wait_steps(run.steps_done() + 1)
        run.kill(run.trainer_pids()[-1])
        run.finish()
        lines, found = list(read_lines(run.paths.metrics)), audited_facts(run.paths).audit
        rejected, causes = run.events("batch.rejected"), [cause for cause, _, _ in run.incidents().values()]
        trainers = len(run.trainer_pids())
        said = [json.loads(line)["completion"] for line in run.paths.samples.read_text().splitlines()]
    metrics = current_lines(lines)
    assert agents
    assert (trainers, "server_crash" in causes) == (2, True)
    assert (found.problems, found.not_known, rejected, len(metrics)) == ((), (), [], STEPS)
    assert found.counts == "16 prompts, each exactly twice; 8 of 8 steps"
    assert found.largest_distance < 1e-4, "each answer is at its own place, behind what the tool said before it"
    assert max(line["rollout/turns/avg"] for line in metrics) > 1
    assert any(re.search(r"</tool_call>\s*tool\s*\d+\s", text) for text in said), said
