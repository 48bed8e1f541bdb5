"""Contradictions between the settings of supervision: thresholds that can never be met, timeouts that can never fire.

Pure, like `launcher.resources.config_checks`, which says them together with its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from launcher.config.schema import RunConfig
from launcher.config.supervision import HealthConfig, RestartConfig, RestoreConfig, RewardHealthConfig

Contradiction = tuple[str, object, str]
"""The key, the value it was given, and what would be allowed."""


def find_contradictions(config: RunConfig) -> Iterator[Contradiction]:
    """Asks only for values that are in their own range."""
    yield from _hangs(config.health)
    yield from _rewards(config.reward_health)
    yield from _certificate(config.restore, config.reward_health)
    yield from _budgets(config.restart, config.rollout.setup_timeout)
    yield from _ladder(config.memory.mem_fraction_static)


def _hangs(health: HealthConfig) -> Iterator[Contradiction]:
    beat_s = health.probe_interval_s + 2 * health.look_interval_s
    if health.silence_s <= beat_s:
        yield (
            "health.silence_s",
            health.silence_s,
            f"more than {beat_s:g}, one probe interval and two looks: else a server is silent between two probes",
        )
    if health.proof_s < health.silence_s:
        yield (
            "health.proof_s",
            health.proof_s,
            f"at least health.silence_s={health.silence_s:g}, or no silence is ever long enough to be seen",
        )


def _rewards(health: RewardHealthConfig) -> Iterator[Contradiction]:
    alert, breaker = health.zero_alert_steps, health.zero_breaker_steps
    if alert is not None and breaker is not None and alert > breaker:
        yield "reward_health.zero_alert_steps", alert, f"at most reward_health.zero_breaker_steps={breaker}, or null"
    if health.warmup_steps > health.baseline_steps:
        yield (
            "reward_health.warmup_steps",
            health.warmup_steps,
            f"at most reward_health.baseline_steps={health.baseline_steps}",
        )


def _certificate(restore: RestoreConfig, health: RewardHealthConfig) -> Iterator[Contradiction]:
    """The streak of zeros is the slowest detector; damage that it is still to find must not be certified."""
    delay = health.zero_breaker_steps
    if delay is not None and restore.good_after_steps < delay:
        yield (
            "restore.good_after_steps",
            restore.good_after_steps,
            f"at least reward_health.zero_breaker_steps={delay}, or damage is certified good before it can be found",
        )


def _budgets(restart: RestartConfig, setup_timeout_s: float) -> Iterator[Contradiction]:
    if restart.wait_initial_s > restart.wait_max_s:
        yield (
            "restart.wait_initial_s",
            restart.wait_initial_s,
            f"at most restart.wait_max_s={restart.wait_max_s:g}, which could never be waited else",
        )
    longest_try_s = setup_timeout_s + restart.wait_max_s
    if restart.window_s <= longest_try_s:
        yield (
            "restart.window_s",
            restart.window_s,
            f"more than {longest_try_s:g} (rollout.setup_timeout + restart.wait_max_s): "
            "a start that fails at its deadline would be forgotten before the next, and tried for ever",
        )


def _ladder(fractions: list[float]) -> Iterator[Contradiction]:
    falls = all(higher > lower for higher, lower in itertools.pairwise(fractions))
    if not fractions or not falls or not all(0 < fraction < 1 for fraction in fractions):
        yield "memory.mem_fraction_static", fractions, "numbers between 0 and 1, each less than the one before"
