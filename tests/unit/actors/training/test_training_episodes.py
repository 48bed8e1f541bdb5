"""A trainer whose samples are episodes: real agents, a server with the trainer's weights, and steps on what it made."""

import pytest

from actors.training.training import Training
from launcher.checkpoints import in_memory_checkpoints
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.reporting.ledger_audit import audit
from launcher.run_files.journal import read_lines
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths
from tests.programs import stand_in_server
from tests.programs.supervised_run import ASSETS, PROMPTS, run_config
from tests.support.ready_servers import ready

STEPS = 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_on_episodes_are_on_tokens_of_the_trainer_s_own_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", tmp_path)
    config = run_config(str(tmp_path), STEPS, 1)
    config.rollout.episode = "tests.support.episodes.agents:two_turns"
    config.gconfig.max_new_tokens = 6
    config.reward.workers = 1
    paths = RunPaths.of(config)
    paths.prepare()
    keys = ServerKeys.make(paths.keys)
    words = ("--truthful", "--weight-version", "0", "--model-path", str(ASSETS / "model"))
    with stand_in_server.running(*words, keys=keys) as url:
        training = Training(config, paths, attempt=1)
        try:
            training.restore(FIRST_WEIGHTS, 0)
            training.servers.set_servers([ready(url, lineage=0)])
            training.allow()
            assert training.run().finished
        finally:
            training.close()
    metrics = list(read_lines(paths.metrics))
    assert len(metrics) == STEPS
    for line in metrics:
        assert line["rollout/turns/avg"] == 2.0
        assert line["rollout/segments/avg"] == 1.0
        assert line["grpo_actor/n_tokens"] == line["rollout/tokens"]  # own tokens alone
        assert line["grpo_actor/logprob_distance/max"] < 1e-4  # each at its own place behind its own context
        assert {"reward_parts/first/avg", "reward_parts/second/avg"} <= set(line)
    assert audit(list(read_lines(paths.ledger)), metrics, prompts=PROMPTS).problems == ()
    assert "and now?" in paths.samples.read_text()
