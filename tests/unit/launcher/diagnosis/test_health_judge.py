"""Healthy is said only where all was seen and all is well."""

import dataclasses

import pytest

from launcher.diagnosis.health.finding import CheckResult, Finding, first_line, is_healthy
from launcher.diagnosis.health.judge_logs import ErrorsSeen, judge_errors
from launcher.diagnosis.health.judge_machine import KillsSeen, judge_kills, judge_memory, judge_room
from launcher.diagnosis.health.judge_run import RunSeen, judge_run
from launcher.diagnosis.health.judge_server import ServerSeen, judge_server
from tests.support.health_parts import verdicts

OK, NOTE, ABSENT, UNKNOWN, BAD = (
    CheckResult.OK,
    CheckResult.NOTE,
    CheckResult.ABSENT,
    CheckResult.UNKNOWN,
    CheckResult.BAD,
)
GIB = 2**30


LIVE = RunSeen(
    is_live=True, word="", reason="", state="RUNNING", state_reason="", open_incidents=(), last_step=9, total_steps=20,
    since_step_s=2.0, usual_step_s=1.5, last_rewards=(0.5,) * 10,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "verdict", "said"),
    [
        ({}, OK, "RUNNING, 10 of 20 steps are done"),
        ({"state": "REPAIRING", "state_reason": "server-1 is restarted"}, BAD, "REPAIRING: server-1 is restarted"),
        ({"open_incidents": ("incident 3: server-1 hangs",)}, BAD, "RUNNING: incident 3: server-1 hangs"),
        ({"state": "INITIALIZING"}, UNKNOWN, "it is still starting"),
        ({"since_step_s": 59.0}, OK, ""),
        ({"since_step_s": 61.0}, BAD, "the last step was 61 s ago, one usually takes 1.5 s"),
        ({"since_step_s": 300.0, "usual_step_s": 40.0}, OK, ""),
        ({"last_rewards": (0.5,) * 5 + (0.0,) * 5}, BAD, "0 in each of the last 5 steps"),
        ({"last_rewards": (0.0,) * 4}, OK, ""),
        ({"is_live": None}, UNKNOWN, "its driver is on another machine"),
        ({"is_live": False}, BAD, "its driver is gone and wrote no last word"),
        ({"is_live": False, "word": "FINISHED", "reason": "all 20"}, OK, "FINISHED: all 20"),
        ({"is_live": False, "word": "ERRORED", "reason": "no memory"}, BAD, "ERRORED: no memory"),
        ({"is_live": False, "word": "ABORTED", "reason": "by you"}, BAD, "ABORTED: by you"),
    ],
)
def test_a_run(change, verdict, said):
    findings = judge_run(dataclasses.replace(LIVE, **change))
    worst = next((v for v in (BAD, UNKNOWN) if v in verdicts(findings)), OK)
    assert worst is verdict
    assert any(said in finding.said for finding in findings)


SERVER = ServerSeen(
    name="server-0", said_state="READY", url="u", process="S", weight_version=7, expected=(7, 8), generated_s=0.1,
    failure="", running=2.0, queued=1.0, kv_use=0.25,
)  # fmt: skip
SILENT = {"generated_s": None, "failure": "no answer within 4 s"}


@pytest.mark.parametrize(
    ("change", "verdict", "said"),
    [
        ({}, OK, "a token in 0.10 s, 2 running, 1 queued, KV cache 25% used, weight_version 7"),
        ({"weight_version": 8}, OK, "weight_version 8"),
        ({"weight_version": 6}, BAD, "it holds weight_version 6, the trainer is at 7 or 8"),
        ({"weight_version": 9}, BAD, "it holds weight_version 9"),
        ({"expected": None, "weight_version": 3}, OK, "weight_version 3"),
        ({"running": None, "queued": None, "kv_use": None}, OK, "a token in 0.10 s, weight_version 7"),
        ({"process": ""}, BAD, "its process is gone"),
        ({"process": "T"}, BAD, "a process of it is stopped"),
        ({"process": "Z"}, BAD, "a process of it has ended"),
        (SILENT | {"running": 0.0}, BAD, "it answers and generates nothing: no answer within 4 s"),
        (SILENT, UNKNOWN, "it says that it is busy, 2 running, 1 queued, KV cache 25% used: no answer within 4 s"),
        (SILENT | {"running": None, "weight_version": None}, BAD, "no answer within 4 s"),
        ({"said_state": "STARTING"}, UNKNOWN, "it is starting"),
        ({"said_state": "DEAD"}, BAD, "it died, and has not been started anew yet"),
        ({"said_state": "ABANDONED"}, BAD, "given up; the run goes on without it"),
    ],
)
def test_a_server(change, verdict, said):
    finding = judge_server(dataclasses.replace(SERVER, **change))
    assert finding.verdict is verdict
    assert said in finding.said


def test_memory_and_room():
    assert verdicts(judge_memory("host memory", used, 100.0) for used in (84, 86, 96, 0)) == [OK, NOTE, BAD, OK]
    rooms = [judge_room("/d", free * GIB, [2 * GIB, 3 * GIB]) for free in (2, 4, 8, 30)]
    assert verdicts(rooms) == [BAD, NOTE, NOTE, OK]
    assert rooms[-1].facts["fits"] == 10
    assert "10 more checkpoints of 3.00 GiB fit" in rooms[-1].said
    assert judge_room("/d", GIB, []).verdict is NOTE


KILLS = KillsSeen(
    kills=(), count=0, since=100.0, until=200.0, own_pids=frozenset({7}), ran_out=(), deaths=0, is_live=True
)


@pytest.mark.parametrize(
    ("change", "verdict", "said"),
    [
        ({}, OK, "none while it ran"),
        ({"kills": ((50.0, 9, "other"),), "count": 1}, OK, "none while it ran (1 since boot)"),
        ({"kills": ((150.0, 9, "other"),), "count": 1}, NOTE, "none of this run: other (pid 9)"),
        ({"kills": ((150.0, 7, "python"),), "count": 1}, NOTE, "killed 1 of this run's processes for memory"),
        ({"kills": ((150.0, 7, "python"),), "count": 1, "is_live": False}, BAD, "python (pid 7)"),
        ({"ran_out": ("server-0 (server_pool)",)}, NOTE, "memory ran out 1 times in this attempt"),
        ({"kills": None, "count": 3, "deaths": 1}, UNKNOWN, "the kernel's log can't be read"),
        ({"kills": None, "count": 3}, OK, "none of this run's processes died (3 since boot)"),
        ({"kills": None}, OK, "none while it ran"),
    ],
)
def test_kills_for_memory(change, verdict, said):
    finding = judge_kills(dataclasses.replace(KILLS, **change))
    assert finding.verdict is verdict
    assert said in finding.said


def test_errors_in_logs_count_while_they_are_young_and_the_run_lives():
    errors = [ErrorsSeen(kind="timed out", log="a.log", count=3, first=10.0, last=950.0)]
    assert verdicts(judge_errors(errors, now=1000.0, recent_s=60, is_live=True)) == [BAD]
    assert verdicts(judge_errors(errors, now=1000.0, recent_s=40, is_live=True)) == [NOTE]
    (dead,) = judge_errors(errors, now=1000.0, recent_s=60, is_live=False)
    assert (dead.verdict, dead.said) == (NOTE, "3 × timed out, from 16 min ago to 50 s ago")
    assert verdicts(judge_errors([], now=1000.0, recent_s=60, is_live=True)) == [OK]


def test_unknown_is_never_healthy_and_nothing_there_is():
    findings = [Finding(check="gpu", subject="GPUs", verdict=v, said=v.value) for v in (OK, NOTE, ABSENT)]
    assert is_healthy(findings)
    assert first_line("run", "RUNNING", findings) == "HEALTHY      run: RUNNING"
    for verdict in (UNKNOWN, BAD):
        ill = [*findings, Finding(check="c", subject="server-0", verdict=verdict, said="hangs")]
        assert not is_healthy(ill)
        assert first_line("run", "RUNNING", ill) == "NOT HEALTHY  run: server-0: hangs"
