"""The figures for Prometheus: each with its name and unit, and none that is not known."""

import math

from launcher.base.messages import EvalReport, ServerInfo, ServerState, TrainerStatus
from launcher.policy.observed import RunState
from launcher.reporting.run_facts import facts_of
from launcher.reporting.run_gauges import GAUGES, gauges_of_facts, gauges_of_status
from launcher.reporting.run_reader import RunData


def values(readings):
    return {(one.name, *one.labels.values()): one.value for one in readings}


def facts(*, steps=(), events=()):
    data = RunData()
    for line in steps:
        data.take_step(line)
    for event in events:
        data.take_event(event)
    return facts_of(data, experiment_name="e", trial_name="t", staleness=0, folders=frozenset())


def step(number, **more):
    return {"global_step": number, "attempt": 1, "time": 1000.0 + number, "timeperf/step_s": 2.0, **more}


def test_a_run_that_has_just_begun_has_no_reward_no_checkpoint_and_no_time_to_repair():
    found = values(gauges_of_facts(facts()))
    assert found[("grpo_incidents_open",)] == 0
    assert found[("grpo_restores",)] == 0
    unknown = {"grpo_reward", "grpo_checkpoint_step", "grpo_repair_seconds", "grpo_ettr", "grpo_last_step"}
    assert not unknown & {name for name, *_ in found}


def test_the_newest_step_and_a_reward_that_it_lacks():
    found = values(gauges_of_facts(facts(steps=[step(0, **{"rollout/reward": 0.5}), step(1)])))
    assert found[("grpo_last_step",)] == 1
    assert found[("grpo_last_step_time_seconds",)] == 1001.0
    assert found[("grpo_step_seconds",)] == 2.0
    assert ("grpo_reward",) not in found, "step 1 has none; that of step 0 is not its reward"


def test_one_state_is_1_and_all_others_are_0():
    events = [
        {"event": "run.started", "time": 1.0, "attempt": 1},
        {"event": "run.paused", "time": 2.0, "state": "PAUSED"},
    ]
    found = values(gauges_of_facts(facts(events=events)))
    states = {state: found[("grpo_run_state", state)] for state in RunState}
    assert [state for state, value in states.items() if value] == ["PAUSED"]
    assert len(states) == len(RunState)


def test_incidents_by_cause_and_the_mean_time_to_repair():
    began = [
        {"event": "incident.began", "incident": n, "time": 10.0 * n, "cause": "server_crash", "subject": "server-0"}
        for n in (1, 2, 3)
    ]
    ended = [{"event": "incident.ended", "incident": n, "time": 10.0 * n + 4 * n, "is_mended": True} for n in (1, 2)]
    seen = facts(events=[*began, *ended])
    found = values(gauges_of_facts(seen))
    assert found[("grpo_incidents", "server_crash")] == 3
    assert found[("grpo_incidents_open",)] == 1
    repairs = [one.repaired_s for one in seen.incidents if one.repaired_s is not None]
    assert len(repairs) == 2
    assert found[("grpo_repair_seconds",)] == sum(repairs) / 2


def test_every_server_state_is_counted_so_that_none_keeps_an_old_count():
    status = TrainerStatus(
        phase="train", next_step=4, total_steps=9, steps_per_epoch=3, policy_version=4, pid=1, seconds_in_phase=0.0
    )
    servers = [ServerInfo(name=f"server-{n}", index=n, generation=0, state=ServerState.READY) for n in range(2)]
    found = values(
        gauges_of_status(status, servers, [EvalReport(policy_version=3, prompts=8, sampled=0.5, greedy=0.25)])
    )
    assert {state: found[("grpo_servers", state)] for state in ServerState} == {
        state: 2 * (state is ServerState.READY) for state in ServerState
    }
    assert found[("grpo_next_step",)] == 4
    assert found[("grpo_eval_accuracy", "greedy")] == 0.25


def test_no_reading_has_a_name_without_a_description_or_a_value_that_is_not_finite():
    seen = facts(steps=[step(0, **{"rollout/reward": math.nan, "timeperf/step_s": math.inf})])
    readings = list(gauges_of_facts(seen))
    assert {one.name for one in readings} <= set(GAUGES)
    assert all(math.isfinite(one.value) for one in readings)
