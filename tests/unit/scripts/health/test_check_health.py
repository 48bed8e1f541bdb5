"""A run is looked at as it is, live or dead; what hangs or lies costs its own check alone, and no server anything."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.request import Request, urlopen

import pytest

from launcher.base.errors import CheckpointError
from launcher.base.findings import Finding
from launcher.base.messages import ServerState
from launcher.checkpoints.checkpoint_store import CheckpointName, CheckpointStore
from launcher.config.compose import REPOSITORY
from launcher.reporting.current_status import CurrentStatusFile, DriverFacts
from launcher.run_files.journal import Journal, append_line, encode
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunLock
from launcher.run_log.last_attempt import ServerRecord
from scripts import check_health, run_processes
from scripts.health import log_check
from scripts.health.disk_check import check_checkpoints, check_disk
from scripts.health.findings import BAD, NOTE, OK, UNKNOWN, run_checks
from scripts.health.log_check import check_logs
from scripts.health.recorded_run import read_view
from scripts.health.run_check import check_run, find_subject
from scripts.health.server_check import check_servers
from tests.programs.fake_run import run_paths
from tests.programs.stand_in_server import running
from tests.support.health_parts import health_of, server, subject_of, verdicts
from tests.support.live_status import beating
from tests.support.machine import scaled
from tests.support.worlds.reporting import NOW


def test_a_check_that_hangs_or_fails_costs_itself_alone():
    hangs = threading.Event()
    good = [Finding("d", "fine", OK)]

    def fails():
        raise CheckpointError("no folder")

    checks = {"hangs": lambda: hangs.wait() and [], "fails": fails, "breaks": lambda: 1 / 0, "disk": lambda: good}
    findings = run_checks(checks, timeout_s=(within_s := scaled(1.0)))
    hangs.set()
    assert [(check, verdicts(found)) for check, found in findings.items()] == [
        ("hangs", [UNKNOWN]),
        ("fails", [UNKNOWN]),
        ("breaks", [UNKNOWN]),
        ("disk", [OK]),
    ]
    assert f"no answer within {within_s:g} s" in findings["hangs"][0].text
    assert findings["fails"][0].text == "no folder"
    assert "ZeroDivisionError" in findings["breaks"][0].text


def fault(url, kind, **more):
    body = json.dumps({"kind": kind, "path": "/generate", "times": None, "seconds": 0} | more).encode()
    urlopen(Request(f"{url}/stand_in/fault", data=body, headers={"Content-Type": "application/json"})).read()


def asked(url):
    with urlopen(f"{url}/stand_in/state") as answer:
        return json.loads(answer.read())["asked"]


def test_a_server_is_asked_for_one_real_token_and_for_nothing_that_changes_it(paths):
    with running("--weight-version", "3") as url:
        subject = subject_of(paths, extra_servers=(url,))
        (_, finding) = check_servers(subject)
        assert finding.level is OK
        assert finding.facts["weight_version"] == 3
        assert set(asked(url)) <= {"/generate", "/model_info", "/metrics/", "/stand_in/state"}
        assert asked(url)["/generate"] == 1
        fault(url, "500")
        (_, finding) = check_servers(subject)
        assert (finding.level, "generates nothing" in finding.text) == (BAD, True)
        fault(url, "slow", seconds=60)
        (_, finding) = check_servers(dataclasses.replace(subject, timeout_s=0.5))
        assert (finding.level, "no answer within" in finding.text) == (BAD, True)
    (_, finding) = check_servers(subject)
    assert (finding.level, "onnect" in finding.text) == (BAD, True)


def test_no_server_that_is_named_is_sent_the_run_s_keys(paths):
    with running("--weight-version", "3", keys=ServerKeys.make(paths.keys)) as url:
        (_, other) = check_servers(subject_of(paths, extra_servers=(url,)))
        assert (other.level, "401" in other.text) == (BAD, True)


def test_the_journal_tells_how_the_servers_of_this_attempt_are(paths):
    old = Journal(paths.events, 1)
    old.record("run.started")
    old.record("server.ready", subject="server-9", url="http://old", pid=5)
    journal = Journal(paths.events, 2)
    journal.record("run.started", reason="resumed")
    journal.record("server.ready", subject="server-0", url="http://a", pid=10)
    journal.record("server.died", subject="server-0", pid=10)
    journal.record("incident.began", subject="server-0", cause="server_crash", incident=4, reason="SIGKILL")
    journal.record("server.starting", subject="server-1")
    view = read_view(paths)
    assert view.servers == {"server-0": ServerRecord(state="DEAD"), "server-1": ServerRecord(state="STARTING")}
    assert view.incidents == {4: "incident 4: server-0 crashed (SIGKILL)"}
    assert (view.deaths, view.pids, view.status) == (1, {10}, "")
    journal.record("server.ready", subject="server-0", url="http://b", pid=11)
    journal.record("incident.ended", subject="server-0", incident=4, is_mended=True)
    journal.record("run.running", state="RUNNING", reason="nothing to do")
    journal.record("run.finished", reason="all steps")
    view = read_view(paths)
    assert view.servers["server-0"] == ServerRecord(state="READY", pid=11)
    assert (view.incidents, view.state, view.status) == ({}, "RUNNING", "FINISHED")


def test_a_server_that_left_as_it_was_asked_to_is_not_missed(paths):
    """After `run_control scale` each look said NOT HEALTHY, its process is gone, for as long as the run went on."""
    journal = Journal(paths.events, 1)
    journal.record("run.started")
    for index in (0, 1):
        journal.record("server.ready", subject=f"server-{index}", url=f"http://{index}", pid=10 + index)
    journal.record("server.leaving", subject="server-1", reason="asked by me")
    now = dataclasses.replace(NOW, health=health_of(server("server-0"), server("server-1", ServerState.STOPPED)))
    served, leaving = check_servers(subject_of(paths, is_live=True, now=now))
    assert (served.level, leaving.level, leaving.text) == (OK, NOTE, "leaving, as requested")
    journal.record("server.left", subject="server-1", reason="asked by me")
    assert list(read_view(paths).servers) == ["server-0"]
    journal.record("server.ready", subject="server-1", url="http://b", pid=20)
    assert read_view(paths).servers["server-1"].state == "READY", "it joined again"


@pytest.mark.parametrize(("is_live", "verdict"), [(True, BAD), (None, BAD), (False, NOTE)])
def test_a_disk_that_went_read_only_is_named(paths, monkeypatch, is_live, verdict):
    """As ext4 does after an error: room there is, and nothing can be saved."""
    subject = dataclasses.replace(subject_of(paths), is_live=is_live)
    assert not [one for one in check_disk(subject) if "read-only" in one.text]
    mounted = os.statvfs(paths.logs)
    flagged = os.statvfs_result((*mounted[:8], mounted.f_flag | os.ST_RDONLY, *mounted[9:]))
    monkeypatch.setattr(os, "statvfs", lambda folder: flagged)
    found = {one.subject: one.level for one in check_disk(subject) if "read-only" in one.text}
    assert found == {"checkpoints": verdict, "logs": verdict}


OF_ANOTHER = "trainer: {adapter: areal}\n"
"""A run whose servers are another project's: its logs alone tell of them."""
LOG = """2026-11-21 03:51:38,382 trainer INFO: step 0: reward 0.336, policy_version 1
2026-11-21 03:51:40,000 trainer WARNING: POST http://127.0.0.1:1/generate: Connection refused
2026-11-21 03:52:40,000 trainer WARNING: ConnectionRefusedError: [Errno 111] Connect call failed
2026-11-21 03:52:41,000 trainer ERROR: it failed
Traceback (most recent call last):
  File "x.py", line 1
TimeoutError
20251111-11:37:11.251 StatsLogger INFO: (AReaL) fine
\x1b[31m20251111-11:37:12.251 Rollout ERROR: Failed after 3 retries each. Payload: x\x1b[0m
INFO:     127.0.0.1:5 - "POST /generate HTTP/1.1" 503 Service Unavailable
the connection was not refused by anybody
"""


def test_connection_errors_are_told_by_kind_and_time(paths):
    paths.config.write_text(OF_ANOTHER)
    paths.trainer_log.write_text(LOG)
    told = {f.facts["kind"]: f.facts for f in check_logs(subject_of(paths))}
    assert {kind: facts["count"] for kind, facts in told.items()} == {
        "connection refused": 2,
        "timed out": 1,
        "request given up": 1,
        "server error (5xx)": 1,
    }
    refused = told["connection refused"]
    assert refused["last"] - refused["first"] == 60
    assert told["timed out"]["last"] - refused["last"] == 1  # the time of the line at the traceback's head
    areal = time.mktime(time.strptime("20251111-11:37:12", "%Y%m%d-%H:%M:%S"))
    assert told["request given up"]["last"] == areal


def test_of_a_huge_log_the_end_is_read(paths, monkeypatch):
    paths.config.write_text(OF_ANOTHER)
    monkeypatch.setattr(log_check, "LOG_BYTES", 1000)
    paths.trainer_log.write_text(LOG + "x" * 2000 + "\nConnection reset by peer\n")
    assert {f.facts["kind"] for f in check_logs(subject_of(paths))} == {"connection reset"}


def save(store, step):
    with store.staging(CheckpointName(epoch=0, epoch_step=step, global_step=step)) as staged:
        (staged / "model.safetensors").write_bytes(b"w" * 1000)
        return store.commit(
            staged, global_step=step, policy_version=step + 1, config_fingerprint={}, health={}, keep=False
        )


def test_checkpoints_that_are_whole_and_one_that_is_not(paths):
    (none,) = check_checkpoints(subject_of(paths))
    assert none.level is BAD  # nothing to resume from, and nobody makes one
    store = CheckpointStore(paths.default_checkpoints)
    save(store, 4)
    newest = save(store, 9)
    (whole,) = check_checkpoints(subject_of(paths))
    assert (whole.level, whole.facts["whole"]) == (OK, [4, 9])
    assert "2 complete by their sizes, the newest of step 9" in whole.text
    for step in range(16):
        append_line(paths.metrics, {"global_step": step, "time": 1.0, "grpo_actor/task_reward/avg": 0.5})
    (judged,) = check_checkpoints(subject_of(paths))
    assert judged.facts["last_good"] == 4  # ten healthy steps after it, and six after the other
    (newest.path / "model.safetensors").write_bytes(b"w" * 10)
    summary, torn = check_checkpoints(subject_of(paths))
    assert summary.facts["whole"] == [4]
    assert (torn.level, "model.safetensors" in torn.text) == (BAD, True)


def test_checkpoints_of_another_program_are_no_damage(paths):
    folder = paths.default_checkpoints / "epoch0epochstep4globalstep4"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"w")
    assert verdicts(check_checkpoints(subject_of(paths))) == [NOTE, NOTE]
    (paths.default_checkpoints / "epoch0epochstep9globalstep9").mkdir()  # empty: nobody's
    assert verdicts(check_checkpoints(subject_of(paths))) == [BAD, NOTE, BAD]


# ── a live run, and a dead one ──


def test_a_tool_that_waits_for_an_answer_is_no_run(paths):
    """resume_training holds the lock while it asks: that was a live run without supervisors, and NOT HEALTHY."""
    journal = Journal(paths.events, 1, time.time)
    journal.record("run.started")
    journal.record("run.finished", reason="all steps are done")
    with RunLock(paths, tool="resume_training"):
        subject = find_subject(paths, timeout_s=1, recent_s=1)
        assert subject.is_live is False
        assert [one.level for one in check_run(subject)] == [OK, OK]
    with RunLock(paths):
        assert find_subject(paths, timeout_s=1, recent_s=1).is_live is True


@pytest.fixture
def live(tmp_path):
    """Real processes under a real lock; servers that serve nothing."""
    command = [sys.executable, "-m", "tests.programs.fake_run", str(tmp_path), "--servers", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stdout.readline() == "up\n"
        try:
            yield run_paths(tmp_path), process
        finally:
            process.stdin.close()
            process.wait(30)


@pytest.fixture
def beats(live):
    """Writes now.json as a live run does, until the test ends."""
    paths, _ = live
    file = CurrentStatusFile(paths, DriverFacts.of_this_process(paths, 1, address="local", is_detached=False))
    file.judged(health_of(server("server-0")))
    with beating(file):
        yield paths


def of_run(paths, **changes):
    return {one.subject: one for one in check_run(subject_of(paths, **changes))}


def test_a_live_run_is_as_its_file_says_and_a_process_that_stands_still_or_is_missing_is_named(beats):
    Journal(beats.events, 1).record("run.running", state="RUNNING", reason="nothing to do")
    found = of_run(beats)
    assert {one.level for one in found.values()} == {OK}, found
    assert set(found["processes"].facts["pids"]) == {"driver", "trainer", "health_monitor", "coordinator"}
    assert verdicts(check_servers(subject_of(beats))) == [OK]
    pids = found["processes"].facts["pids"]
    os.kill(pids["driver"], signal.SIGSTOP)
    stopped = seen_bad(beats)
    os.kill(pids["driver"], signal.SIGCONT)
    assert stopped == f"stopped: driver {pids['driver']}"
    os.kill(pids["coordinator"], signal.SIGKILL)
    assert seen_bad(beats) == "no process of coordinator"


def seen_bad(paths):
    """What is said of the processes once it is bad."""
    give_up_at = time.monotonic() + scaled(30)
    while (found := of_run(paths)["processes"]).level is not BAD:
        assert time.monotonic() < give_up_at
    return found.text


def test_a_file_that_nobody_writes_is_never_taken_for_health(live, monkeypatch):
    """However young it looks: the machine was started again, or its clock was set."""
    monkeypatch.setattr(run_processes, "BEAT_S", 0.1)
    paths, _ = live
    Journal(paths.events, 1).record("run.running", state="RUNNING", reason="nothing to do")
    for age_s in (-3600.0, 3600.0):
        paths.now.write_bytes(
            encode(dataclasses.asdict(dataclasses.replace(NOW, health=health_of(server("server-0")))))
        )
        os.utime(paths.now, (time.time() - age_s,) * 2)
        found = of_run(paths)
        assert (found["now.json"].level, "trainer" in found) == (BAD, False), age_s
        assert verdicts(check_servers(subject_of(paths))) == [UNKNOWN], age_s
    paths.now.write_bytes(b"[" * 100_000)
    assert of_run(paths)["now.json"].level is BAD
    paths.lock.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    subject = subject_of(paths)
    assert (subject.is_live, of_run(paths)["now.json"].level) == (None, UNKNOWN)


def test_a_run_on_another_machine_or_in_another_container_is_live_while_it_writes(beats):
    """Its state was unknown from here, and so were its servers; of one in another container the report said that its
    driver is gone."""
    Journal(beats.events, 1).record("run.running", state="RUNNING", reason="nothing to do")
    for signed in ({"host": "elsewhere"}, {"host": socket.gethostname(), "pid_namespace": "pid:[1]"}):
        beats.lock.write_text(json.dumps({"pid": 1, **signed}))
        assert run_processes.is_live(beats) is None, signed
        subject = subject_of(beats)
        assert (subject.is_live, subject.processes) == (True, None), signed
        assert {one.level for one in check_run(subject)} == {OK}, signed
        assert verdicts(check_servers(subject)) == [OK], signed


def test_without_a_name_the_run_that_goes_on_is_meant(live, capsys):
    paths, _ = live
    dataclasses.replace(paths, trial_name="old").prepare()
    dataclasses.replace(paths, experiment_name="older").prepare()
    check_health.main(["--fileroot", str(paths.fileroot), "--timeout", "1"])
    assert "game / day" in capsys.readouterr().out


def test_of_a_dead_run_its_word_counts_and_what_it_left_behind(paths, capsys):
    with RunLock(paths):
        journal = Journal(paths.events, 1)
        journal.record("run.started", reason="fresh")
    save(CheckpointStore(paths.default_checkpoints), 4)
    arguments = ["--fileroot", str(paths.fileroot), "--user", "ann", "--json"]
    assert check_health.main(arguments) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["healthy"], told["is_live"]) == ("grpo-health/1", False, False)
    assert set(told["findings"][0]) == {"check", "subject", "verdict", "said", "facts"}
    journal.record("run.finished", reason="all steps")
    assert check_health.main(arguments[:-1]) == 0
    assert capsys.readouterr().out.startswith("HEALTHY      exp / t0: FINISHED: all steps\n")
    assert {f["check"] for f in told["findings"]} == set(check_health.CHECKS)


def test_of_a_run_that_never_was_nothing_is_said_that_nobody_saw(paths):
    """It was said to have ended, and to watch its servers."""
    subject = subject_of(paths)
    said = [one.text for check in (check_run, check_servers, check_logs) for one in check(subject)]
    assert said == [
        f"{paths.logs} has no events.jsonl of a run",
        "no run is seen that has any",
        "a run of this launcher watches its servers itself: its logs are not searched",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fileroot", "{root}/none"], "{root}/none/logs is not there"),
        (["--fileroot", "{root}", "--user", "bob"], "holds ann"),
        (["--fileroot", "{root}", "--user", "ann", "--experiment-name", "exb"], "holds exp"),
        (["--fileroot", "{root}", "--user", "ann", "--trial-name", "t9"], "holds t0"),
        (["{root}/logs/ann/exp/t8"], "holds t0"),
        (["{root}/logs/ann/exp/t0/events.jsonl"], "give the folder that it lies in: {root}/logs/ann/exp/t0"),
        (["{root}/logs/ann"], "give a run below it: {root}/logs/ann/exp/t0"),
        (["{root}/logs/ann/exp/t0/../t8"], "holds t0"),
        (["{root}/logs"], "is not …/logs/<user>/<experiment>/<trial>"),
        (["{root}/logs/ann/exp/t0", "--trial-name", "t0"], "give one of them"),
        (["{root}/logs/ann/exp/t0", "--timeout", "0"], "--timeout"),
    ],
)
def test_a_wrong_command_names_what_exists_instead(paths, capsys, arguments, said):
    Journal(paths.events, 1).record("run.started")
    root = str(paths.fileroot)
    assert check_health.main([argument.replace("{root}", root) for argument in arguments]) == 2
    assert said.replace("{root}", root) in capsys.readouterr().err


def test_a_folder_that_goes_away_while_runs_are_looked_for(paths, capsys, monkeypatch):
    """A live run's staged checkpoint does. It was a traceback."""
    Journal(paths.events, 1).record("run.started")
    (staged := paths.checkpoints / "staged").mkdir(parents=True)
    scandir = os.scandir

    def gone(folder="."):
        if str(folder).rstrip("/") == str(staged):
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", gone)
    assert check_health.main([str(paths.checkpoints)]) == 2
    assert f"{paths.checkpoints} is not …/logs/<user>/<experiment>/<trial>" in capsys.readouterr().err
