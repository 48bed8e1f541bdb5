"""Sound and spoilt batches, the gate's rules, a GPU whose memory ran out, a trainer that is watched."""

import dataclasses

from launcher.config.supervision import GateConfig, HealthConfig, MemoryConfig
from launcher.policy.admission import BatchReport, GateRules, UsualValues
from launcher.policy.memory_backoff import (
    MemorySettings,
)
from launcher.policy.trainer_liveness import TrainerEvidence, TrainerLook, judge_trainer, observe_trainer

EXACT = GateRules(settings=GateConfig(), is_exact=True, versions_behind=0)
ROUNDED = dataclasses.replace(EXACT, is_exact=False)
SOUND = BatchReport(
    policy_version=7,
    weight_versions=(7,),
    completions=128,
    without_reward=0,
    empty=0,
    nonfinite_logprobs=0,
    uneven_groups=0,
    requests=16,
    truncated=6,
    blank=1,
    mean_reward=0.5,
    low_reward=0.0,
    high_reward=1.0,
    logprob_distance=1.3e-7,
)


USUAL = UsualValues(
    mean_reward=0.5, reward_range=1.0, reward_noise=0.05, truncated_share=0.05, blank_share=0.01, distance=7e-4
)


def changed(**change):
    return dataclasses.replace(SOUND, **change)


def spoiled(batch, **change):
    """`batch` with its first rollout changed: fields of the rollout, or of its completion."""
    first = batch.groups[0].rollouts[0]
    of_rollout = {k: v for k, v in change.items() if k in ("reward", "text")}
    of_completion = {k: v for k, v in change.items() if k not in of_rollout}
    rollout = dataclasses.replace(
        first, completion=dataclasses.replace(first.completion, **of_completion), **of_rollout
    )
    group = dataclasses.replace(batch.groups[0], rollouts=(rollout, *batch.groups[0].rollouts[1:]))
    return dataclasses.replace(batch, groups=(group, *batch.groups[1:]))


class OneTake:
    def take_prompts(self, n):
        return [f"p{i:03d}" for i in range(n)]


CONFIG = MemoryConfig()
GPU = MemorySettings(
    mem_fraction_static=0.8,
    max_total_tokens=None,
    max_concurrent_rollouts=16,
    max_tokens_per_mb=4096,
    gradient_checkpointing=False,
    max_new_tokens=512,
    n_samples=8,
    longest_sequence=1500,
    on_gpu=True,
    shares_gpu=True,
)


SETTINGS = HealthConfig()
MEDIAN_S = 2.0
LIMIT_S = max(SETTINGS.trainer_min_s, SETTINGS.trainer_factor * MEDIAN_S)


def watch(
    until,
    *,
    at=30.0,
    stopped=False,
    mute=False,
    idle=False,
    waits=False,
    asleep=False,
    unwatched_s=0.0,
    median=MEDIAN_S,
):
    """The first time after `at` with each health. What is named happens from `at` on."""
    first, evidence, t, cpu, progress, pinged_at = {}, None, 0.0, 0.0, 0, 0.0
    while t < until:
        begun = t >= at
        halted = begun and stopped
        cpu += 0.0 if halted or (begun and asleep) else 0.2
        progress += not (begun and (stopped or idle or waits))
        pinged_at = pinged_at if begun and (stopped or mute) else t
        look = TrainerLook(
            at=t,
            state="T" if halted else "R",
            cpu_s=cpu,
            pinged_at=pinged_at,
            ping_waits=begun and (stopped or mute),
            progress=progress,
            waits_for="a server" if begun and waits else "",
            median_step_s=median,
        )
        evidence = observe_trainer(evidence, look, SETTINGS) if evidence else TrainerEvidence(look=look)
        verdict = judge_trainer(evidence, SETTINGS, t)
        if begun:
            first.setdefault(verdict.health, (t - at, verdict))
        t += unwatched_s if begun and unwatched_s and t - at < SETTINGS.look_interval_s else SETTINGS.look_interval_s
    return first
