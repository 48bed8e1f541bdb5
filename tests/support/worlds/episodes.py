"""Settings of an episode that uses a tool."""

from launcher.config.schema import RewardConfig, RolloutConfig, RunConfig


def config_of(agent, **settings):
    rollout = RolloutConfig(
        episode=f"tests.support.episodes.agents:{agent}",
        retry_wait_initial=0.001,
        retry_wait_max=0.01,
        request_retries=5,
        **{"episode_timeout": 60.0, "max_turns": 4, **settings},
    )
    return RunConfig(experiment_name="episodes", rollout=rollout, reward=RewardConfig())
