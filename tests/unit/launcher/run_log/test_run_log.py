"""One fold of a run's files: however its lines come, whatever stands between them, and wherever its clock was set."""

import json
import random

import pytest

from launcher.diagnosis.reading.inputs import find_inputs, read_inputs
from launcher.reporting.event_lines import tell, what_happened
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import RunLog, RunLogFiles, read_run_log
from scripts import check_ledger, diagnose, report
from scripts.health.recorded_run import read_run
from tests.support.long_run import LongRun

T0 = 1_790_000_000.0
NAMES = ("events.jsonl", "metrics.jsonl")
FOREIGN = (
    *(b"not json\n", b"[1, 2]\n", b"{}\n", b"17\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"),
    *(b'{"global_step": "7", "attempt": null, "time": "x"}\n', b'{"event": 5, "time": 1}\n'),
    b'{"global_step": %s}\n' % (b"9" * 400),
)
OF_WRONG_TYPES = (
    {"event": "trainer.restored", "global_step": "4", "attempt": [1]},
    {"event": "trainer.restored", "global_step": float("inf"), "attempt": 9, "lineage": {}},
    {"event": "incident.began", "incident": True, "time": -5, "attempt": {}},
    {"event": "incident.ended", "incident": "1", "is_mended": True},
    {"event": "checkpoint.committed", "global_step": 10**400},
    {"event": "checkpoint.condemned", "checkpoints": [f"globalstep{'9' * 5000}", 7, None]},
    {"event": "checkpoint.pruned", "subject": {}, "checkpoints": "globalstep4"},
    {"event": "trainer.loaded", "global_step": None},
    {"event": "eval.done", "policy_version": 3, "prompts": 4, "sampled": 0.5, "greedy": 0.5, "by_dataset": {"a": 3}},
    {"event": "eval.done", "policy_version": "3", "prompts": 4, "sampled": 0.5, "greedy": 0.5},
    {"event": "health.outside_weights", "global_step": {}, "attempt": 1.5},
    {"event": "server.died", "incident": 10**30, "detected_after_s": "long"},
)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")


def everything(log):
    restores = log.restores()
    return (
        *(log.standing(), log.stepped_back(), restores, log.restored_steps(), log.attempts(), log.last_word()),
        *(log.total_steps(), log.prompts, log.checkpoints, log.states, log.batches_rejected),
        log.incident_facts(restores, folders=frozenset({1}), say=what_happened),
    )


def evals_of(log):
    return [(one.policy_version, one.sampled, one.greedy) for one in log.evals()]


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_followed_says_what_its_whole_files_say(paths, seed):
    """Lines come as they are written, also half of one; the live page and the report must not differ."""
    LongRun(paths, steps=200, incidents=8, attempts=3, seed=seed).write()
    files = [paths.metrics, paths.events]
    content = {path: path.read_bytes() for path in files}
    whole = read_run_log(paths)
    assert len(whole.restores()) > 3
    assert len(whole.incidents) == 8
    draw = random.Random(seed)
    for path in files:
        path.write_bytes(b"")
    follower, written = RunLogFiles(paths), dict.fromkeys(files, 0)
    while any(written[path] < len(content[path]) for path in files):
        path = draw.choice(files)
        end = written[path] + draw.randrange(20_000)
        with path.open("ab") as file:
            file.write(content[path][written[path] : end])
        written[path] = min(end, len(content[path]))
        log = follower.refresh()
        everything(log)
    assert everything(log) == everything(whole)
    assert evals_of(log) == evals_of(whole)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_no_line_of_a_run_changes_nothing(paths, seed):
    LongRun(paths, steps=150, incidents=6, attempts=2, seed=seed).write()
    clean = read_run_log(paths)
    draw = random.Random(seed)
    for path in (paths.metrics, paths.events):
        lines = path.read_bytes().splitlines(keepends=True)
        strange = [*FOREIGN, *(json.dumps(one).encode() + b"\n" for one in OF_WRONG_TYPES if path is paths.events)]
        for line in strange:
            lines.insert(draw.randrange(len(lines)), line)
        path.write_bytes(b"".join(lines) + b'{"global_step": 4, "ti')
    files = RunLogFiles(paths)
    found = files.refresh(has_ended=True)
    assert everything(found) == everything(clean)
    assert evals_of(found) == evals_of(clean)
    begins = [f"{len(FOREIGN) + 1} lines of {name} are no record of a run (line " for name in NAMES]
    assert [said.startswith(begin) for said, begin in zip(files.not_read(), begins, strict=True)] == [True, True]


def test_a_line_that_never_ends_is_one_line(paths, monkeypatch):
    """Each piece of it was counted, and a piece that is JSON by itself was a step."""
    monkeypatch.setattr("launcher.run_files.journal.LONGEST_LINE", 64)
    paths.logs.mkdir(parents=True)
    step = b'{"global_step": 1}\n'
    paths.metrics.write_bytes(step + b"x" * 128 + step + step.replace(b"1", b"2"))
    files = RunLogFiles(paths)
    assert [line.step for line in files.refresh(has_ended=True).steps] == [1, 2]
    assert files.not_read()[0].startswith("1 line of metrics.jsonl is no record of a run (line 2: ")


def test_no_tool_ends_by_what_is_no_line_of_a_run(paths):
    """The diagnosis and a terminal's line of an incident raised OverflowError."""
    LongRun(paths, steps=60, incidents=2).write()
    for path, more in ((paths.metrics, ()), (paths.events, OF_WRONG_TYPES)):
        with path.open("ab") as file:
            file.write(b"".join([*FOREIGN, *(json.dumps(one).encode() + b"\n" for one in more)]))
            file.write(b'{"event": "checkpoint.committed", "global_step": 1, "time": %s}\n' % (b"9" * 400))
    for tool in (diagnose, check_ledger, report):
        tool.main([str(paths.logs)])
    assert paths.report.exists()
    assert read_run(paths)[1].last_step == 59
    assert tell({"event": "incident.ended", "incident": 1, "seconds": 10**400, "subject": "server-0"})


def test_a_step_that_no_machine_counts_to_ends_no_diagnosis(paths):
    """OverflowError: Python int too large to convert to C long."""
    LongRun(paths, steps=40, incidents=1).write()
    with paths.metrics.open("a") as file:
        file.write(f'{{"global_step": {10**30}}}\n')
    assert len(read_inputs(find_inputs([paths.metrics])).steps) == len(read_run_log(paths).steps)


def log_of(*lines):
    """Lines with an `event` are events; they were written 10 s after each other."""
    log = RunLog()
    for number, line in enumerate(lines):
        timed = {"time": T0 + 10 * number, "monotonic": 10.0 * number, "attempt": 1} | line
        assert log.take_event(timed) if "event" in line else log.take_step(timed)
    return log


def test_a_line_of_another_attempt_does_not_move_an_incident(paths):
    """An attempt that ended wrote one line more: what came after was taken as of the first weights, and the incident as
    begun before any step."""
    log = log_of(
        {"event": "run.started", "attempt": 2},
        {"event": "trainer.restored", "attempt": 2, "lineage": 1, "global_step": 4},
        *({"global_step": step, "attempt": 2, "lineage": 1} for step in (5, 6, 7)),
        {"event": "run.aborted", "attempt": 1},
        {"event": "incident.began", "incident": 1, "attempt": 2, "cause": "server_crash"},
        {"global_step": 8, "attempt": 2, "lineage": 1},
    )
    (one,) = log.incident_facts((), folders=frozenset(), say=what_happened)
    assert (one.lines_before, one.step, one.next_step_s) == (3, 8, 10.0)


@pytest.mark.parametrize("name", ["trainer.loaded", "recovery.taken"])
def test_steps_are_undone_by_whatever_takes_the_weights_back(name):
    """The list of checkpoints said that the run is at step 4, and the report that it is at step 9."""
    log = log_of(
        {"event": "trainer.restored", "lineage": 1, "global_step": -1},
        *({"global_step": step, "lineage": 1} for step in range(10)),
        {"event": name, "global_step": 4, "attempt": 2},
    )
    assert [line.step for line in log.standing()[0]] == [0, 1, 2, 3, 4]
    assert log.restores() == ()


def test_a_restore_that_was_not_borne_out_has_undone_no_step():
    """What it had set aside was put back and resumed from, and the report had these steps as undone, also where the
    trainer was killed and restored once more before the first of its steps showed it."""
    lines = [
        {"event": "trainer.restored", "lineage": 1, "global_step": -1},
        *({"global_step": step, "lineage": 1} for step in range(10)),
        {"event": "trainer.restored", "lineage": 2, "global_step": 4},
        {"event": "trainer.restored", "lineage": 3, "global_step": 4},
        {"event": "trainer.loaded", "global_step": 4},
    ]
    assert [line.step for line in log_of(*lines).standing()[0]] == [0, 1, 2, 3, 4]
    lines += [{"event": "health.outside_weights", "lineage": 3, "global_step": None}]
    contradicted = log_of(*lines)
    assert contradicted.standing() == (tuple(contradicted.steps), ())
    assert contradicted.newest_step() == 9
    lines += [{"event": "trainer.restored", "attempt": 2, "lineage": 1, "global_step": 8}]
    lines += [{"global_step": step, "attempt": 2, "lineage": 1} for step in (9, 10)]
    log = log_of(*lines)
    steps, undone = log.standing()
    assert [line.step for line in steps] == list(range(11))
    assert [[line.step for line in one] for one in undone] == [[9]]
    assert [(one.step, one.steps_back) for one in log.restores()] == [(4, 5), (4, 0), (8, 1)], "they were all made"


def test_what_is_said_twice_of_one_restore_takes_no_other_back():
    """A monitor that is killed after it has said it has a successor that is asked the same batch, and says it too."""
    lines = [
        {"event": "trainer.restored", "lineage": 1, "global_step": -1},
        *({"global_step": step, "lineage": 1} for step in range(20)),
        {"event": "trainer.restored", "lineage": 2, "global_step": 5},
        *({"global_step": step, "lineage": 2} for step in range(6, 10)),
        {"event": "trainer.restored", "lineage": 3, "global_step": 7},
        *[{"event": "health.outside_weights", "global_step": None}] * 2,
    ]
    log = log_of(*lines)
    assert (log.newest_step(), [one.step for one in log.stepped_back()]) == (9, [5])


def test_the_words_are_those_of_the_last_attempt():
    log = log_of({"event": "run.errored", "reason": "broken"}, {"event": "run.started", "attempt": 2})
    assert log.last_word() == ("", "")
    log.take_event({"event": "run.finished", "attempt": 2, "reason": "all steps", "time": T0 + 50})
    assert log.last_word() == ("FINISHED", "all steps")
