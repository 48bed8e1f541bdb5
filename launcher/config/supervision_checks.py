"""Finds contradictions between the settings of supervision: a threshold that can't be met, a timeout that can't fire.

Pure; `launcher.resources.config_checks` reports them together with its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from launcher.config.schema import RunConfig
from launcher.config.settings import seconds_of


def find_contradictions(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The key, and what would be allowed. Every value must be in its own range."""
    yield from _health(config)
    yield from _rewards(config)
    yield from _restarts(config)
    fractions = config.memory.mem_fraction_static
    falls = all(higher > lower for higher, lower in itertools.pairwise(fractions))
    if not fractions or not falls or not all(0 < fraction < 1 for fraction in fractions):
        yield "memory.mem_fraction_static", "numbers between 0 and 1, each less than the one before"


def _health(config: RunConfig) -> Iterator[tuple[str, str]]:
    health = config.health
    beat_s = health.probe_interval_s + 2 * health.look_interval_s
    if health.silence_s <= beat_s:
        yield (
            "health.silence_s",
            f"more than {beat_s:g}, one probe interval and two looks: else a server is silent between two probes",
        )
    if health.stopped_s <= 2 * health.look_interval_s:
        yield "health.stopped_s", f"more than {2 * health.look_interval_s:g}, two looks: one is no length of time"
    if health.proof_s < health.silence_s:
        yield (
            "health.proof_s",
            f"at least health.silence_s={health.silence_s:g}, or no silence is ever long enough to be seen",
        )


def _rewards(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The streak of zeros is the slowest detector; damage that it has yet to find must not be certified as good."""
    health = config.reward_health
    alert, breaker = health.zero_alert_steps, health.zero_breaker_steps
    if alert is not None and breaker is not None and alert > breaker:
        yield "reward_health.zero_alert_steps", f"at most reward_health.zero_breaker_steps={breaker}, or null"
    if health.warmup_steps > health.baseline_steps:
        yield "reward_health.warmup_steps", f"at most reward_health.baseline_steps={health.baseline_steps}"
    if breaker is not None and config.restore.good_after_steps < breaker:
        yield (
            "restore.good_after_steps",
            f"at least reward_health.zero_breaker_steps={breaker}, or damage is certified good before it can be found",
        )


def _restarts(config: RunConfig) -> Iterator[tuple[str, str]]:
    restart = config.restart
    run = config.run
    if run.walltime is not None and config.cluster.detached:
        yield "run.walltime", "null with cluster.detached=true: such a run outlives its command"
    if run.walltime is not None and seconds_of(run.walltime) <= 2 * run.margin_s:
        yield "run.walltime", f"more than {2 * run.margin_s:g} s, twice run.margin_s: the run would end at once"
    if run.preemption_notice is not None and run.notice_s <= run.margin_s:
        no_time = f"more than run.margin_s={run.margin_s:g}, or there is no time to save in"
        yield "run.notice_s", f"{no_time}; where a cloud leaves no more than that, lower run.margin_s"
    if restart.wait_initial_s > restart.wait_max_s:
        yield "restart.wait_initial_s", f"at most restart.wait_max_s={restart.wait_max_s:g}, the longest wait"
    longest_try_s = config.rollout.setup_timeout + restart.wait_max_s
    if restart.window_s <= longest_try_s:
        yield (
            "restart.window_s",
            f"more than {longest_try_s:g} (rollout.setup_timeout + restart.wait_max_s): "
            "a start that fails at its deadline would be forgotten before the next, and tried for ever",
        )
