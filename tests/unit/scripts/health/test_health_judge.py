"""Healthy is said only where all was seen and all is well."""

import dataclasses

import pytest

from launcher.base.findings import Finding
from launcher.base.messages import Cause, Health, ServerState
from launcher.policy.reward_health import RewardPoint
from launcher.run_log.run_log import RunLog
from scripts.health.disk_check import judge_space
from scripts.health.findings import ABSENT, BAD, NOTE, OK, UNKNOWN, first_line, is_healthy
from scripts.health.log_check import ErrorsSeen, judge_errors
from scripts.health.machine_check import judge_kills, judge_memory
from scripts.health.recorded_run import LastSteps, RecordedRun, last_steps
from scripts.health.run_check import judge_run
from scripts.health.server_check import Answered, judge_answer, judge_server
from tests.support.health_parts import health_of, server, verdict, verdicts

GIB = 2**30
NOW = 1000.0


def rewards(*means):
    return tuple(RewardPoint(step=step, mean=mean, low=0.0, high=2 * mean) for step, mean in enumerate(means))


STEPS = LastSteps(last_step=9, last_at=NOW - 2, usual_step_s=1.5, rewards=rewards(*[0.5] * 10))
HARD = (0.0, 0.0, 0.0, 0.1) * 12
"""In three of four steps nothing is solved."""


ALERT_AT_6 = {"reward_health": {"zero_alert_steps": 6, "zero_breaker_steps": None, "warmup_steps": "15"}}


def view_of(**changes):
    return RecordedRun(state="RUNNING", total_steps=20, started_at=100.0, ended_at=200.0, **changes)


def test_a_run_whose_data_were_used_up_before_the_planned_steps_is_complete():
    log = RunLog()
    log.take_event({"event": "trainer.started", "total_steps": 20, "attempt": 1, "time": NOW})
    log.take_event(
        {"event": "run.finished", "reason": "the data are used up", "global_step": 9, "attempt": 1, "time": NOW}
    )
    findings = judge_run(RecordedRun.of(log, {}), STEPS, is_live=False, now=NOW)
    assert findings[0].text == "FINISHED: the data are used up"
    assert set(verdicts(findings)) == {OK}


@pytest.mark.parametrize(
    ("change", "verdict", "said"),
    [
        ({}, OK, "RUNNING, 10 of 20 steps are done"),
        ({"state": "REPAIRING", "state_reason": "server-1 is restarted"}, BAD, "REPAIRING: server-1 is restarted"),
        ({"incidents": {3: "incident 3: server-1 hangs"}}, BAD, "RUNNING: incident 3: server-1 hangs"),
        (
            {"waits": {"gate": (NOW - 1, "the trainer waits at the gate: no answer")}},
            BAD,
            "RUNNING: the trainer waits at the gate",
        ),
        ({"state": "INITIALIZING"}, UNKNOWN, "it is still starting"),
        ({"last_at": NOW - 59}, OK, ""),
        ({"last_at": NOW - 61}, BAD, "the last step was 61 s ago, one usually takes 1.5 s"),
        ({"last_at": NOW - 300, "usual_step_s": 40.0}, OK, ""),
        ({"last_at": NOW + 59}, OK, "the last step was 0 s ago"),
        ({"last_at": NOW + 3600}, UNKNOWN, "the last step's time is 3600 s ahead of this clock: its age is not known"),
        ({"rewards": rewards(*[0.5] * 5, *[0.0] * 5)}, BAD, "every reward was 0 for 5 steps in a row"),
        ({"rewards": rewards(*[0.5] * 5, *[0.0] * 5), "settings": ALERT_AT_6}, OK, ""),
        ({"rewards": rewards(*[0.0] * 4)}, OK, ""),
        ({"rewards": rewards(*[0.5] * 5, *[0.0] * 4), "restored_step": 2}, BAD, "0 for 4 steps"),  # on probation
        ({"rewards": rewards(*HARD, *[0.0] * 5)}, OK, ""),  # as the run's own rule has it
        ({"rewards": rewards(*HARD, *[0.0] * 60)}, BAD, "as in 36 of the 48 steps before"),
        ({"is_live": None}, UNKNOWN, "its driver is on another machine"),
        ({"is_live": False}, BAD, "its driver is gone and recorded no final status"),
        ({"is_live": False, "status": "FINISHED", "reason": "all 20", "last_step": 19}, OK, "FINISHED: all 20"),
        ({"is_live": False, "status": "FINISHED", "reason": "all 20"}, UNKNOWN, "metrics.jsonl ends after 10"),
        ({"is_live": False, "status": "FINISHED", "last_step": None}, UNKNOWN, "metrics.jsonl ends after 0"),
        ({"state": "PAUSED", "held": "asked by ann", "last_at": NOW - 9000}, OK, "PAUSED as asked:"),
        ({"state": "PAUSED", "state_reason": "the disk is full"}, BAD, "PAUSED: the disk is full"),
        ({"is_live": False, "status": "ERRORED", "reason": "no memory"}, BAD, "ERRORED: no memory"),
        ({"is_live": False, "status": "ABORTED", "reason": "by you"}, BAD, "ABORTED: by you"),
    ],
)
def test_a_run(change, verdict, said):
    is_live = change.get("is_live", True)
    view, steps = view_of(), STEPS
    for name, value in change.items():
        if hasattr(steps, name):
            steps = dataclasses.replace(steps, **{name: value})
        elif name != "is_live":
            setattr(view, name, value)
    findings = judge_run(view, steps, is_live=is_live, now=NOW)
    worst = next((v for v in (BAD, UNKNOWN) if v in verdicts(findings)), OK)
    assert worst is verdict
    assert any(said in finding.text for finding in findings)


@pytest.mark.parametrize(
    ("began", "over"),
    [("gate.waiting", "gate.answered"), ("step.late", "step.came"), ("gate.waiting", "trainer.died")],
)
def test_what_the_trainer_waits_for_is_no_health_until_it_is_over(began, over):
    view = view_of()
    view.take_event({"event": began, "subject": "trainer", "reason": "no answer", "time": NOW - 1})
    (state, *_) = judge_run(view, STEPS, is_live=True, now=NOW)
    assert (state.level, state.text.endswith("no answer")) == (BAD, True)
    stepped = dataclasses.replace(STEPS, last_at=NOW - 0.5)
    assert set(verdicts(judge_run(view, stepped, is_live=True, now=NOW))) == {OK}, "who was to say that it is over died"
    view.take_event({"event": over, "subject": "trainer"})
    assert set(verdicts(judge_run(view, STEPS, is_live=True, now=NOW))) == {OK}


def test_steps_that_can_not_be_read_are_not_known(tmp_path):
    """As root reads every file, a folder stands for a file that may not be read."""
    (tmp_path / "metrics.jsonl").mkdir()
    steps = last_steps(RunLog(), tmp_path / "metrics.jsonl")
    state, judged = judge_run(view_of(), steps, is_live=True, now=NOW)
    assert (state.text, judged.level, judged.text) == (
        "RUNNING",
        UNKNOWN,
        "metrics.jsonl can't be read: Is a directory",
    )
    ended = view_of()
    ended.status = "FINISHED"
    _, judged = judge_run(ended, steps, is_live=False, now=NOW)
    assert (judged.level, judged.text) == (UNKNOWN, "metrics.jsonl can't be read: Is a directory")
    (tmp_path / "metrics.jsonl").rmdir()
    (state,) = judge_run(view_of(), last_steps(RunLog(), tmp_path / "metrics.jsonl"), is_live=True, now=NOW)
    assert state.text == "RUNNING, 0 of 20 steps are done"


SUSPECT = verdict(Health.SUSPECT, "no token for 4 s")
DEAD = verdict(Health.DEAD, "one of its processes is stopped", Cause.SERVER_HANG)
NOT_KNOWN = verdict(Health.UNKNOWN, "its actor does not answer")


@pytest.mark.parametrize(
    ("seen", "result", "said"),
    [
        (server(), OK, "it makes tokens; weight_version 7"),
        (server(judged=SUSPECT), BAD, "no token for 4 s; weight_version 7"),
        (server(judged=NOT_KNOWN), UNKNOWN, "its actor does not answer; weight_version 7"),
        (server(judged=DEAD), BAD, "one of its processes is stopped; weight_version 7"),
        (server(state=ServerState.DEAD, judged=DEAD), BAD, "DEAD: one of its processes is stopped"),
        (server(state=ServerState.STARTING, weight_version=None), UNKNOWN, "STARTING, it gets no requests"),
        (server(state=ServerState.STALE, reason="behind"), UNKNOWN, "STALE, it gets no requests; behind; weight_ver"),
        (server(state=ServerState.STALE, judged=DEAD), BAD, "STALE: one of its processes is stopped"),
        (server(state=ServerState.SUSPECT, reason="refused"), BAD, "SUSPECT; refused; it makes tokens"),
        (server(state=ServerState.STOPPED), BAD, "STOPPED: "),
        (server(state=ServerState.FAILED), BAD, "given up; the run continues without it"),
    ],
)
def test_a_server_is_as_the_run_sees_it(seen, result, said):
    finding = judge_server(seen, health_of(seen))
    assert (finding.level, finding.text[: len(said)]) == (result, said)
    assert "None" not in finding.text


def test_how_old_a_server_s_verdict_is_counts_the_silence_of_its_actor():
    seen = server(silent_s=3.5)
    assert judge_server(seen, health_of(seen)).facts["age_s"] == 4.0


SILENT = {"generated_s": None, "failure": "no answer within 4 s"}


@pytest.mark.parametrize(
    ("change", "result", "said"),
    [
        ({}, OK, "a token in 0.10 s, weight_version 7"),
        (SILENT | {"running": 0.0}, BAD, "it answers and generates nothing: no answer within 4 s"),
        (SILENT, UNKNOWN, "it reports to be busy, 2 running: no answer within 4 s"),
        (SILENT | {"running": None, "weight_version": None}, BAD, "no answer within 4 s"),
    ],
)
def test_a_server_that_no_run_watches_is_as_it_answers(change, result, said):
    answered = {"weight_version": 7, "generated_s": 0.1, "running": 2.0} | change
    finding = judge_answer(Answered(url="u", **answered))
    assert (finding.level, said in finding.text) == (result, True)


@pytest.mark.parametrize(
    ("judged", "subject", "result", "said"),
    [
        ({"trainer": DEAD}, "trainer", BAD, DEAD.reason),
        ({"trainer": NOT_KNOWN}, "trainer", UNKNOWN, NOT_KNOWN.reason),
        ({"rewards": SUSPECT}, "reward", BAD, SUSPECT.reason),
        ({"rewards": NOT_KNOWN}, "reward", UNKNOWN, NOT_KNOWN.reason),
        ({}, "reward", OK, "mean of 0.500 over the last 10 steps"),
    ],
)
def test_a_live_run_judges_its_trainer_and_its_rewards_itself(judged, subject, result, said):
    findings = judge_run(view_of(), STEPS, is_live=True, now=NOW, health=health_of(**judged))
    (finding,) = (one for one in findings if one.subject == subject)
    assert (finding.level, finding.text) == (result, said)


def test_memory_and_disk_space():
    assert verdicts(judge_memory("host memory", used, 100.0) for used in (84, 86, 96, 0)) == [OK, NOTE, BAD, OK]
    spaces = [judge_space("/d", free * GIB, [2 * GIB, 3 * GIB]) for free in (2, 4, 8, 30)]
    assert verdicts(spaces) == [BAD, NOTE, NOTE, OK]
    assert spaces[-1].facts["fits"] == 10
    assert "room for 10 more checkpoints of 3.00 GiB" in spaces[-1].text
    assert "room for 1 more checkpoint of" in spaces[1].text
    assert judge_space("/d", GIB, []).level is NOTE


@pytest.mark.parametrize(
    ("change", "verdict", "said"),
    [
        ({}, OK, "none while it ran"),
        ({"kills": ((50.0, 9, "other"),), "count": 1}, OK, "none while it ran (1 since boot)"),
        ({"kills": ((150.0, 9, "other"),), "count": 1}, NOTE, "none of this run: other (pid 9)"),
        ({"kills": ((150.0, 7, "python"),), "count": 1}, NOTE, "killed 1 of this run's processes for memory"),
        ({"kills": ((150.0, 7, "python"),), "count": 1, "is_live": False}, BAD, "python (pid 7)"),
        ({"ran_out": ["server-0 (server_pool)"]}, NOTE, "memory ran out 1 time in this attempt"),
        ({"kills": None, "count": 3, "deaths": 1}, UNKNOWN, "the kernel's log can't be read"),
        ({"kills": ((50.0, 7, "python"),), "count": 1}, OK, "none while it ran"),  # another's, before, of the same pid
        ({"kills": None, "count": 3}, OK, "none of this run's processes died (3 since boot)"),
        ({"kills": None}, OK, "none while it ran"),
        (
            {"kills": ((150.0, 9, "other"),), "count": 1, "has_all_pids": False},
            UNKNOWN,
            "it is not known whether of this run, whose ended ones nobody recorded: other (pid 9)",
        ),
        (
            {"kills": ((150.0, 7, "python"),), "count": 1, "has_all_pids": False},
            NOTE,
            "killed 1 of this run's processes",
        ),
        ({"kills": None, "count": 3, "has_all_pids": False}, UNKNOWN, "3 since boot; the kernel's log can't be read"),
    ],
)
def test_kills_for_memory(change, verdict, said):
    known = {"kills": (), "count": 0, "is_live": True} | change
    view = view_of(ran_out=known.pop("ran_out", []), deaths=known.pop("deaths", 0))
    finding = judge_kills(view, known.pop("kills"), own_pids={7}, now=200.0, **known)
    assert finding.level is verdict
    assert said in finding.text


def test_errors_in_logs_count_while_they_are_young_and_the_run_lives():
    errors = [ErrorsSeen(kind="timed out", log="a.log", count=3, first=10.0, last=950.0)]
    assert verdicts(judge_errors(errors, now=1000.0, recent_s=60, is_live=True)) == [BAD]
    assert verdicts(judge_errors(errors, now=1000.0, recent_s=40, is_live=True)) == [NOTE]
    (dead,) = judge_errors(errors, now=1000.0, recent_s=60, is_live=False)
    assert (dead.level, dead.text) == (NOTE, "3 × timed out, from 16 min ago to 50 s ago")
    (none,) = judge_errors([], now=1000.0, recent_s=60, is_live=True)
    assert (none.level, none.text) == (OK, "no connection error in the logs")
    (none,) = judge_errors([], now=1000.0, recent_s=60, is_live=True, is_all=False)
    assert none.text == "no connection error in the last 32 MiB of each log"


def test_unknown_is_never_healthy_and_nothing_there_is():
    findings = [Finding("GPUs", v.value, v) for v in (OK, NOTE, ABSENT)]
    assert is_healthy(findings)
    assert first_line("run", "RUNNING", findings) == "HEALTHY      run: RUNNING"
    for result in (UNKNOWN, BAD):
        ill = [*findings, Finding("server-0", "hangs", result)]
        assert not is_healthy(ill)
        assert first_line("run", "RUNNING", ill) == "NOT HEALTHY  run: server-0: hangs"


def test_a_finished_run_whose_last_rewards_are_0_is_not_healthy():
    view = RecordedRun(status="FINISHED", reason="all steps are done")
    steps = LastSteps(last_step=99, last_at=NOW, usual_step_s=1.0, rewards=rewards(*[0.0] * 10))
    (_, reward) = judge_run(view, steps, is_live=False, now=NOW)
    assert (reward.level, reward.text) == (BAD, "every reward was 0 for 10 steps in a row")
