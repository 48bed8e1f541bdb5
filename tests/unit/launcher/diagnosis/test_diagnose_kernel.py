"""The kernel's own lines (`dmesg -T`, kern.log, journalctl): read, dated, and of the process that they name."""

import os
import time

import pytest

from launcher.diagnosis.judging.rules import Guess
from launcher.diagnosis.judging.verdict import RunCondition
from launcher.diagnosis.reading.log_records import Kind, Role
from tests.support.worlds.diagnosis import CHILD_FAILED, EXIT_CODE, diagnosis_of, run_that_stops

INVOKED = "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0"
STACK = " oom_kill_process+0x104/0x210"
CONSTRAINT = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg=/docker/ab,"
    "task_memcg=/docker/ab,task={process},pid={pid},uid=0"
)
KILL = "Out of memory: Killed process {pid} ({process}) total-vm:9kB, anon-rss:8kB, UID:0 oom_score_adj:0"
CGROUP = "Memory cgroup out of memory: Killed process {pid} ({process}) total-vm:9kB, anon-rss:8kB"
REAPED = "oom_reaper: reaped process {pid} ({process}), now anon-rss:0kB"
LINES = (INVOKED, STACK, CONSTRAINT, KILL, REAPED)
HEADS = {
    "dmesg.log": "[Tue Nov 11 10:00:20 2025] ",
    "dmesg.iso.log": "2025-11-11T10:00:20,123456+00:00 ",
    "kern.log": "Nov 11 10:00:20 host kernel: [123456.789012] ",
    "syslog": "Nov 11 10:00:20 host kernel: ",
    "journal.log": "2025-11-11T10:00:20+0000 host kernel: ",
}
AT = 1762855220.0


def kernel_log(folder, name="dmesg.log", *, process="sglang::schedul", pid=77, lines=LINES):
    path = folder / name
    text = "[Mon Nov 10 09:00:00 2025] Linux version 6.8\n" if name == "dmesg.log" else ""
    path.write_text(text + "".join(HEADS[name] + line.format(process=process, pid=pid) + "\n" for line in lines))
    written = time.mktime((2026, 3, 1, 0, 0, 0, 0, 0, -1))
    os.utime(path, (written, written))
    return path


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("line", [KILL, CGROUP, CONSTRAINT], ids=["host", "cgroup", "constraint"])
def test_a_kill_is_dated_and_of_the_process_that_it_names(tmp_path, name, line):
    contents = diagnosis_of(kernel_log(tmp_path, name, lines=(line,))).contents
    (event,) = contents.log_events
    assert (event.kind, event.role, event.count) == (Kind.KILLED_FOR_MEMORY, Role.SERVER, 1)
    assert (int(event.time), event.facts["pid"], event.facts["process"]) == (AT, 77, "sglang::schedul")
    assert contents.sources[0].role is Role.KERNEL


def test_the_lines_of_one_kill_are_one_and_whoever_asked_for_memory_is_not_the_victim(tmp_path):
    (event,) = diagnosis_of(kernel_log(tmp_path)).contents.log_events
    assert (event.facts["process"], event.count) == ("sglang::schedul", 1)


def test_a_server_killed_by_the_kernel_ran_out_of_memory_and_is_named(tmp_path):
    exits = "20251111-{at}.000 SGLangServer INFO: SGLang server http://127.0.0.1:1 exits, returncode=-9"
    folder = run_that_stops(tmp_path / "run", trainer=[("10:00:21", exits)])
    assert diagnosis_of(folder).causes.first.guess is Guess.SERVER_CRASH
    kernel_log(folder)
    found = diagnosis_of(folder)
    assert (found.condition, found.causes.first.guess) == (RunCondition.STOPPED, Guess.OUT_OF_MEMORY)
    assert "the kernel killed sglang::schedul (pid 77), of the server" in found.headline
    assert "sglang.max_total_tokens" in found.remedy.change  # the host's memory, not the GPU's


@pytest.mark.parametrize(("pid", "whose"), [(4242, ", of the trainer"), (1, "")])
def test_a_process_is_the_trainer_s_where_its_launcher_names_the_same_pid(tmp_path, pid, whose):
    lines = [("10:00:21", CHILD_FAILED), ("10:00:21", EXIT_CODE)]
    folder = run_that_stops(tmp_path / "run", trainer=lines)
    kernel_log(folder, process="python3", pid=pid)
    found = diagnosis_of(folder)
    assert found.causes.first.guess is Guess.OUT_OF_MEMORY
    assert f"the kernel killed python3 (pid {pid}){whose})" in found.headline
    assert ("compare the pid" in found.remedy.change) is (not whose)


def test_a_program_that_is_not_the_run_s_is_no_cause_of_its_end(tmp_path):
    folder = run_that_stops(tmp_path / "run", trainer=[("10:00:21", CHILD_FAILED)])
    kernel_log(folder, process="chrome")
    found = diagnosis_of(folder)
    assert found.causes.first.guess is Guess.TRAINER_CRASH
    assert [e.kind for e in found.contents.log_events if e.facts.get("pid") == 77] == [Kind.OTHER_KILLED]


def test_a_kernel_log_that_is_longer_than_the_run_s_makes_no_stall(tmp_path):
    folder = run_that_stops(tmp_path / "run")
    text = (folder / "trainer.log").read_text()
    (folder / "trainer.log").write_text(text.replace("/120 done", "/60 done"))
    (folder / "dmesg.log").write_text("[Tue Nov 11 09:00:00 2025] usb: new\n[Wed Nov 12 09:00:00 2025] usb: gone\n")
    assert diagnosis_of(folder).condition is RunCondition.FINE


def test_times_since_the_machine_s_start_are_no_dates(tmp_path):
    (tmp_path / "dmesg.log").write_text("[  123.456789] " + KILL.format(pid=7, process="python3") + "\n")
    found = diagnosis_of(tmp_path / "dmesg.log")
    assert [event.time for event in found.contents.log_events] == [None]
    assert "dmesg -T" in found.contents.sources[0].note


@pytest.mark.parametrize("day", ["Mon Nov 10", "Wed Nov 12"])
def test_what_was_killed_when_the_run_did_not_write_is_none_of_its_processes(tmp_path, day):
    folder = run_that_stops(tmp_path / "run")
    line = f"[{day} 10:00:20 2025] " + KILL.format(pid=7, process="python3")
    (folder / "dmesg.log").write_text(line + "\n")
    found = diagnosis_of(folder)
    assert found.condition is RunCondition.UNCLEAR  # its log ends at step 60 of 120, and nothing says why
    assert [e.kind for e in found.contents.log_events if e.facts.get("pid") == 7] == [Kind.OTHER_KILLED]
