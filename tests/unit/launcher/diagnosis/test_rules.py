"""Each rule of the diagnosis on both sides of its bound: what was seen around a fall, and what it counts for."""

from dataclasses import replace

import pytest

from launcher.diagnosis.judging.causes import weigh
from launcher.diagnosis.judging.incident_context import context_of
from launcher.diagnosis.judging.rules import RULES, Guess, half_the_rate
from launcher.diagnosis.judging.step_history import falls_of, main_fall, passes_of
from launcher.diagnosis.reading.log_records import (
    ENTROPY,
    GRAD_NORM,
    KL,
    LOSS,
    NO_EOS,
    REWARD,
    ROLLOUT_REWARD,
    ROLLOUT_S,
    SEQ_LEN,
    UPDATED,
    Contents,
    Kind,
    LogEvent,
    Role,
    Source,
    Steps,
)

FELL, STEPS = 60, 100
CRASH, HANG, MEMORY = Guess.SERVER_CRASH, Guess.SERVER_HANG, Guess.OUT_OF_MEMORY
DEGRADATION, REWARD_FUNCTION, TRAINER = Guess.DEGRADATION, Guess.REWARD_FUNCTION, Guess.TRAINER_CRASH
ZERO, NAN = lambda step: 0.0, float("nan")


def slowly(step):
    return max(0.6 - 0.02 * (step - FELL), 0.0)


def event(kind, *, step=FELL - 1, role=Role.SERVER, **facts):
    """After `step`; with `seconds` from then on, at the steps' times."""
    time = 1e9 + 60.0 * step
    return LogEvent(
        kind=kind, role=role, time=time, last_time=time + facts.get("seconds", 0), after_step=step, facts=facts
    )


def weights(cause, *events, rewards=ZERO, falls=True, **figures):
    """What each rule counted for the cause, heaviest first. `figures`: (before the fall, from it on)."""
    steps = Steps()
    for step in range(STEPS):
        reward = rewards(step) if falls and step >= FELL else 0.6 + 0.02 * (step % 5)
        now = {name: pair[step >= FELL] for name, pair in figures.items()}
        steps.append(step, 1e9 + 60.0 * (step + 1), {REWARD: reward, **now})
    sources = tuple(
        Source(path=role, what="log", role=role, bytes=1, first_time=1e9, last_time=1e9 + 60 * STEPS)
        for role in (Role.TRAINER, Role.SERVER)
    )
    contents = Contents(steps=steps, log_events=events, sources=sources)
    causes = weigh(context_of(contents, main_fall(falls_of(steps, passes_of(steps)))))
    (found,) = [one for one in causes.ranked if one.guess is cause] or [None]
    return [] if found is None else [one.weight for one in (*found.supporting, *found.opposing)]


REFUSED, RAISED = event(Kind.REFUSED), event(Kind.SERVER_EXCEPTION)
NO_LOG_OF_IT = {CRASH: -2, MEMORY: -3, DEGRADATION: -2}
"""What counts against a cause where only the rewards fell, at once to 0, and no line speaks for it."""


@pytest.mark.parametrize("cause", Guess)
def test_a_fall_alone_accuses_nobody(cause):
    assert weights(cause) == ([NO_LOG_OF_IT[cause]] if cause in NO_LOG_OF_IT else [])


FIGURES = [
    (CRASH, ROLLOUT_S, (10, 4.9), 2),
    (CRASH, ROLLOUT_S, (10, 5.1), None),
    (HANG, ROLLOUT_S, (10, 40), 2),
    (HANG, ROLLOUT_S, (10, 39.9), None),
    (HANG, ROLLOUT_S, (10, 14.9), -1),
    (HANG, ROLLOUT_S, (10, 15), None),
    (REWARD_FUNCTION, ROLLOUT_S, (10, 1.9), -5),
    (REWARD_FUNCTION, ROLLOUT_S, (10, 2), -2),
    (REWARD_FUNCTION, ROLLOUT_S, (10, 5), None),
    (REWARD_FUNCTION, SEQ_LEN, (100, 120), 3),
    (REWARD_FUNCTION, SEQ_LEN, (100, 130), None),
    (REWARD_FUNCTION, SEQ_LEN, (100, 150), -1),
    (DEGRADATION, ENTROPY, (1, 0.69), 2),
    (DEGRADATION, ENTROPY, (1, 0.7), None),
    (DEGRADATION, SEQ_LEN, (100, 141), 1),
    (DEGRADATION, SEQ_LEN, (100, 140), None),
    (DEGRADATION, NO_EOS, (0.1, 0.26), 1),
    (DEGRADATION, NO_EOS, (0.1, 0.24), None),
    (DEGRADATION, UPDATED, (1, 0.4), 1),
    (DEGRADATION, UPDATED, (1, 0.6), None),
    (DEGRADATION, GRAD_NORM, (1, 3.1), 2),
    (DEGRADATION, GRAD_NORM, (1, 3), None),
    (DEGRADATION, KL, (1, 4.1), 2),
    (DEGRADATION, KL, (1, 4), None),
    (DEGRADATION, LOSS, (1, NAN), 3),
    (CRASH, ROLLOUT_REWARD, (0.6, NAN), 1),
    (HANG, ROLLOUT_REWARD, (0.6, NAN), 1),
]


@pytest.mark.parametrize(("cause", "figure", "values", "weight"), FIGURES)
def test_a_figure_counts_on_its_side_of_the_bound(cause, figure, values, weight):
    expected = sorted([*weights(cause), *([] if weight is None else [weight])])
    assert sorted(weights(cause, **{figure: values})) == expected


def killed(role):
    return event(Kind.KILLED_FOR_MEMORY, role=role, pid=1, process="python3")


EARLIER = event(Kind.REFUSED, step=20)
HUNG = event(Kind.NO_TOKENS, step=FELL - 3, seconds=700.0)
LINES = {
    "exit": (CRASH, [event(Kind.SERVER_EXITED, exit_code=1)], [3]),
    "exit as before": (CRASH, [event(Kind.SERVER_EXITED, step=20), event(Kind.SERVER_EXITED)], [3]),
    "exception": (CRASH, [RAISED], [3]),
    "refused, never before": (CRASH, [REFUSED], [3]),
    "refused as before": (CRASH, [EARLIER, REFUSED], [1]),
    "refused far more often": (CRASH, [EARLIER, EARLIER, replace(REFUSED, count=4)], [3]),
    "lost, never before": (CRASH, [event(Kind.LOST)], [1]),
    "lost as before": (CRASH, [event(Kind.LOST, step=20), event(Kind.LOST)], []),
    "the run's own word": (CRASH, [event(Kind.INCIDENT, cause="server_crash")], [6, -2]),
    "the run's word on another": (CRASH, [event(Kind.INCIDENT, cause="server_hang")], [-2]),
    "a server out of memory": (CRASH, [RAISED, event(Kind.OUT_OF_MEMORY, ran_out="server_device")], [3, -6]),
    "watchdog": (HANG, [event(Kind.SERVER_WATCHDOG)], [3]),
    "health check": (HANG, [event(Kind.SERVER_UNHEALTHY)], [2]),
    "no answer": (HANG, [event(Kind.TIMEOUT)], [2]),
    "no answer as before": (HANG, [event(Kind.TIMEOUT, step=20), event(Kind.TIMEOUT)], []),
    "no answer, and refused": (HANG, [event(Kind.TIMEOUT), REFUSED], [-2]),
    "no tokens for two minutes": (HANG, [event(Kind.NO_TOKENS, seconds=120.0)], [3]),
    "no tokens for less": (HANG, [event(Kind.NO_TOKENS, seconds=119.0)], []),
    "no tokens any more": (HANG, [event(Kind.NO_TOKENS, seconds=0.0, is_last=True)], [4]),
    "tokens to the end": (HANG, [event(Kind.NO_TOKENS, step=90, seconds=0.0, is_last=True)], [-3]),
    "raised": (HANG, [RAISED], [-6]),
    "raised after a silence": (HANG, [HUNG, RAISED], [3]),
    "raised after a silence that was over": (HANG, [replace(HUNG, last_time=RAISED.time - 1), RAISED], [3, -6]),
    "raised a minute into a silence": (HANG, [event(Kind.NO_TOKENS, step=FELL - 2, seconds=700.0), RAISED], [3, -6]),
    "raised, nobody knows when": (HANG, [HUNG, replace(RAISED, time=None)], [3, -6]),
    "raised after its watchdog": (HANG, [event(Kind.SERVER_WATCHDOG), RAISED], [3]),
    "out of memory": (MEMORY, [event(Kind.OUT_OF_MEMORY)], [6]),
    "a kill of a server": (MEMORY, [killed(Role.SERVER)], [6]),
    "a kill of nobody known": (MEMORY, [killed(Role.UNKNOWN)], [5]),
    "a kill, and a line": (MEMORY, [killed(Role.SERVER), event(Kind.OUT_OF_MEMORY)], [6, 2]),
    "another program's kill": (MEMORY, [event(Kind.OTHER_KILLED)], [1, -3]),
    "failed connections": (DEGRADATION, [REFUSED], [-2, -2]),
    "no reward": (DEGRADATION, [event(Kind.REWARD_ERROR)], [-2, -1]),
    "rewards late": (REWARD_FUNCTION, [event(Kind.REWARD_TIMEOUT)], [3]),
    "rewards late as before": (REWARD_FUNCTION, [event(Kind.REWARD_TIMEOUT, step=20), event(Kind.REWARD_TIMEOUT)], []),
    "rewards raised": (REWARD_FUNCTION, [event(Kind.REWARD_ERROR)], [3]),
    "failed requests": (REWARD_FUNCTION, [event(Kind.TIMEOUT)], [-2]),
    "the trainer failed": (TRAINER, [event(Kind.TRAINER_FAILED, role=Role.TRAINER)], [3]),
    "SIGKILL": (TRAINER, [event(Kind.KILLED, role=Role.TRAINER)], [3]),
    "failed by SIGKILL": (TRAINER, [event(Kind.TRAINER_FAILED), event(Kind.KILLED)], [3]),
    "out of memory first": (
        TRAINER,
        [event(Kind.TRAINER_FAILED), event(Kind.OUT_OF_MEMORY, role=Role.TRAINER)],
        [3, -2],
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_count_by_what_else_was_seen(name):
    cause, events, expected = LINES[name]
    assert weights(cause, *events) == expected


SHAPES = [
    (DEGRADATION, slowly, [3]),
    (DEGRADATION, lambda step: 0.25, [1]),
    (DEGRADATION, lambda step: 0.6 if step % 4 == 0 else 0.0, [-2]),
    (REWARD_FUNCTION, slowly, [-1]),
]


@pytest.mark.parametrize(("cause", "rewards", "expected"), SHAPES)
def test_the_shape_of_the_fall_counts(cause, rewards, expected):
    assert weights(cause, rewards=rewards) == expected


@pytest.mark.parametrize("cause", [DEGRADATION, REWARD_FUNCTION])
def test_without_a_fall_neither_policy_nor_reward_function_is_accused(cause):
    assert weights(cause, event(Kind.TIMEOUT, step=STEPS - 1), falls=False) == [-2]
    late = event(Kind.REWARD_TIMEOUT, step=STEPS - 1)
    assert weights(cause, late, falls=False) == ([3] if cause is REWARD_FUNCTION else [-2])


def test_every_cause_has_rules():
    assert set(RULES) == set(Guess)


@pytest.mark.parametrize("rate", [0, None, "fast"])
def test_a_rate_that_can_not_be_halved_is_left(rate):
    assert half_the_rate({"actor.optimizer.lr": rate}) == ""
