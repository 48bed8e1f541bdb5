"""What a run's files tell of its health, dead or alive: the damage that stands."""

import json

import numpy as np
import pytest

from launcher.checkpoints.health_evidence import SeenSteps, judge
from launcher.checkpoints.onset import find_falls, standing
from launcher.checkpoints.recorded_health import read_health
from launcher.config.supervision import RestoreConfig
from tests.support.checkpoint_makers import write_rewards
from tests.support.worlds.checkpoints import HEALTHY, began


def ended(number, *, mended, at=1101.0):
    return {"event": "incident.ended", "time": at, "incident": number, "is_mended": mended}


def restored(step, *, at=1100.5, event="trainer.restored"):
    return {"event": event, "time": at, "global_step": step}


def test_a_run_without_files_tells_nothing(paths):
    past = read_health(paths)
    assert (len(past.seen), past.damage, past.last_step) == (0, None, -1)


def test_a_healthy_run_has_no_damage(paths):
    write_rewards(paths, HEALTHY)
    past = read_health(paths)
    assert (past.damage, past.last_step) == (None, 39)
    assert past.reward_around(2) == pytest.approx(sum(HEALTHY[:8]) / 8)
    assert past.reward_around(60) is None


@pytest.mark.parametrize(("cause", "first"), [("reward_collapse", 29), ("nonfinite", 29), ("verifier_broken", 30)])
def test_an_open_incident_is_damage_from_where_its_cause_begins(paths, cause, first):
    write_rewards(paths, HEALTHY, events=[began(1, 30, cause=cause), ended(1, mended=False)])
    damage = read_health(paths).damage
    assert (damage.onset_step, damage.first_step) == (30, first)
    assert damage.source == f"incident 1, {cause}"


@pytest.mark.parametrize(
    "over",
    [
        [ended(1, mended=True)],
        [restored(28)],
        [restored(28, event="trainer.loaded")],
        [restored(28, event="recovery.taken")],
    ],
)
def test_what_was_mended_or_gone_back_before_is_no_damage(paths, over):
    write_rewards(paths, HEALTHY[:29], events=[began(1, 30), *over])
    assert read_health(paths).damage is None


def test_a_restore_into_the_damage_takes_nothing_back(paths):
    write_rewards(paths, HEALTHY, events=[began(1, 30), restored(33)])
    assert read_health(paths).damage.onset_step == 30


def test_an_incident_that_touched_no_weights_is_no_damage(paths):
    write_rewards(paths, HEALTHY, events=[began(1, None, cause="server_crash"), ended(1, mended=False)])
    assert read_health(paths).damage is None


def committed(step, *, at=1050.0):
    return {"event": "checkpoint.committed", "time": at, "global_step": step}


def test_an_incident_whose_prompts_were_never_trained_on_is_no_damage(paths):
    """A run that had ended as its judge could not be asked went back three steps of healthy training: 'checkpoints of
    step 8 and later hold the damage', where step 7 was its last."""
    unscored = [began(1, 40, cause="verifier_broken", at=1040.0), ended(1, mended=False, at=1070.0)]
    write_rewards(paths, HEALTHY, events=[committed(39, at=1039.5), *unscored])
    past = read_health(paths)
    assert past.damage is None
    assert past.last_good_step == past.last_step == 39


@pytest.mark.parametrize(("rewards", "more"), [([*HEALTHY, 0.5], []), (HEALTHY, [committed(40)]), ([], [])])
def test_the_damage_of_an_incident_stands_where_its_step_was_trained_or_nothing_shows_which_were(paths, rewards, more):
    write_rewards(paths, rewards, events=[began(1, 40, cause="verifier_broken", at=1040.0), *more])
    assert read_health(paths).damage.first_step == 40


def test_a_restore_takes_back_the_steps_after_it_before_they_are_repeated(paths):
    write_rewards(paths, HEALTHY, events=[restored(20, at=2000.0)])
    assert read_health(paths).last_step == 20


@pytest.mark.parametrize("set_by_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_around_a_restore_hides_no_damage_and_brings_none_back(paths, set_by_s):
    """A machine whose clock was an hour ahead until it was set: the beginning of the run came after all of its steps,
    which then were not there, and the newest checkpoint passed for sound whatever they showed."""
    steps = [*[(step, 1, 0.5 + 0.04 * (-1) ** step) for step in range(40)], *[(step, 1, 0.0) for step in range(40, 52)]]
    begun = restored(-1, at=1000.0 + set_by_s) | {"lineage": 1}

    def found(*events, more=()):
        write_rewards(paths, [reward for _, _, reward in (*steps, *more)], events=[begun, *events])
        lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
        for line, (step, lineage, _) in zip(lines, (*steps, *more), strict=True):
            line |= {"global_step": step, "lineage": lineage}
        paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_health(paths)

    assert found().damage.onset_step == 40
    back = restored(37, at=1051.5 + set_by_s) | {"lineage": 2}
    assert (found(back).damage, found(back).last_step) == (None, 37)
    again = [(step, 2, 0.5 + 0.04 * (-1) ** step) for step in range(38, 60)]
    assert (found(back, more=again).damage, found(back, more=again).last_step) == (None, 59)


def test_what_no_detector_watched_is_found_in_the_rewards(paths):
    write_rewards(paths, [*HEALTHY, *[0.0] * 12])
    damage = read_health(paths).damage
    assert damage.onset_step == 40
    assert damage.first_step == 39
    assert damage.source == "the rewards, as read now"


def test_a_fall_of_new_prompts_is_no_damage_and_one_after_it_is(paths):
    rebased = {"event": "reward.rebased", "time": 1045.5, "global_step": 40}
    harder = [one / 2 for one in HEALTHY]
    write_rewards(paths, [*HEALTHY, *harder])
    assert read_health(paths).damage is not None
    write_rewards(paths, [*HEALTHY, *harder], events=[rebased])
    past = read_health(paths)
    assert past.damage is None
    assert past.last_step == 79
    write_rewards(paths, [*HEALTHY, *harder, *[0.0] * 12], events=[rebased])
    assert read_health(paths).damage.onset_step == 80


def test_the_run_s_own_settings_hold_and_detectors_that_were_off_hide_nothing(paths):
    write_rewards(paths, [*HEALTHY, *[0.0] * 12])
    off = "reward_health: {zero_breaker_steps: null, fall_threshold: null}\n"
    paths.config.write_text(f"{off}restore: {{good_after_steps: 3, no_such: 1}}")
    past = read_health(paths)
    assert (past.damage.onset_step, past.settings.good_after_steps) == (40, 3)
    for broken in ("- 1", "{", "restore: 3"):
        paths.config.write_text(broken)
        assert read_health(paths).settings == RestoreConfig()


def damage_in(rewards):
    series = np.array(rewards, dtype=float)
    seen = SeenSteps(steps=np.arange(len(series)), rewards=series)
    return judge(seen, standing(find_falls(series)), RestoreConfig(), source="").damage


@pytest.mark.parametrize("after", [[0.0] * 300, [0.1, 0.12] * 150, [0.0] * 40 + HEALTHY * 3])
def test_a_collapse_of_long_ago_is_found_too(after):
    """At the end of such a series everything has been flat, or well, for a long time."""
    damage = damage_in([*HEALTHY, *after])
    assert damage is not None
    assert abs(damage.onset_step - 40) <= 2


def test_a_healthy_series_stays_one_however_it_is_cut():
    assert all(damage_in((HEALTHY * 20)[:end]) is None for end in range(0, 800, 10))
