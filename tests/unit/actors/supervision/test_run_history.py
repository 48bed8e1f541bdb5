"""What a Coordinator knows of its predecessor: all that was decided, on its own clock, or a clear error."""

import asyncio
import dataclasses
import json
import time

import pytest

from actors.foreign.kept_weights import LINEAGE
from actors.supervision.coordinator_actor import take_place
from actors.supervision.run_history import RunHistory
from launcher.base.disk_faults import DiskFault
from launcher.base.errors import DiskError, RunError
from launcher.base.messages import Cause, Health, Incident, ServerExit, Verdict
from launcher.cli.attempt_incidents import begin_memory
from launcher.config.schema import RunConfig
from launcher.policy.actions import AbandonServer, Halt, RestoreTrainer
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus
from launcher.policy.incident_policy import Trouble
from launcher.policy.observed import TrainerFacts
from launcher.policy.restart_budget import RepairAttempt, Rung, next_repair
from launcher.policy.restore import choose
from launcher.run_files import run_memory
from launcher.run_files.journal import Journal, append_line, read_lines
from launcher.run_files.run_memory import MemoryFile, RunMemory
from launcher.run_files.run_paths import RunPaths
from tests.support.run_memory import history_of

HOUR_S = 3600.0


@pytest.fixture
def events(tmp_path):
    return tmp_path / "events.jsonl"


def restarted(history, at):
    history.attempted(RepairAttempt(at=at, cause=Cause.SERVER_CRASH, subject="server-0", rung=Rung.SERVER))


def test_a_successor_knows_the_words_of_each_failure_and_whether_the_halt_may_pass(events):
    history = history_of(events)
    told = RepairAttempt(at=1.0, cause=Cause.TRAINER_CRASH, subject="trainer", rung=Rung.RESTORE, told="KeyError: 'a'")
    history.attempted(told)
    history.begun(Halt(reason="again", may_pass=True))
    after = history_of(events)
    assert after.attempts == [told]
    assert (after.memory.ending_reason, after.memory.ending_may_pass) == ("again", True)


def test_a_reason_that_is_no_unicode_is_remembered_readably(events):
    """The name of a file in the user's exception: no Coordinator could write its memory, nor begin anything."""
    history = history_of(events)
    told = RepairAttempt(at=1.0, cause=Cause.TRAINER_CRASH, subject="trainer", rung=Rung.RESTORE, told="no \udcff.sh")
    history.attempted(told)
    history.save()
    after = history_of(events)
    assert after.attempts == [dataclasses.replace(told, told="no \\udcff.sh")]
    file = MemoryFile(events.with_name("other.json"), "n")
    file.begin(2, last_incident=0, of_a_command=[{"event": "trainer.starting", "reason": "\udcff"}])
    assert file.read(2).command_events == [{"event": "trainer.starting", "reason": "\\udcff"}]


def test_a_load_of_the_state_is_not_called_a_damaged_checkpoint(events):
    """Each start has one: it counts as a try in case it fails, and nothing is known to be damaged."""
    history_of(events).attempted(
        RepairAttempt(at=1.0, cause=Cause.CHECKPOINT_CORRUPT, subject="trainer", rung=Rung.RETRY)
    )
    (event,) = read_lines(events)
    assert event["reason"] == "counts against the restart budget of checkpoint_corrupt (retry)"


@pytest.mark.parametrize("set_by_s", [HOUR_S, -HOUR_S])
def test_a_wall_clock_that_is_set_moves_no_repair(events, monkeypatch, set_by_s):
    """Set back by an hour, the next restart of a dead server waited for that hour."""
    at = time.monotonic() - 5.0
    with monkeypatch.context() as patch:
        was_set = time.time() + set_by_s
        patch.setattr(run_memory.time, "time", lambda: was_set)  # as it was when this was written: set since
        restarted(history_of(events, node="this"), at)
    history = history_of(events, node="this")
    assert [attempt.at for attempt in history.attempts] == [at]
    settings = RunConfig(experiment_name="clock").restart
    now = time.monotonic()
    again = next_repair(Cause.SERVER_CRASH, "server-0", history.attempts, settings, now=now, progress_at=None)
    assert (again.rung, again.not_before) == (Rung.SERVER, at + settings.wait_initial_s)
    assert again.reason.endswith(f"2 of {settings.server}")


def test_times_of_another_machine_are_put_on_this_clock_once(events, monkeypatch):
    theirs = time.monotonic() + 10 * HOUR_S
    with monkeypatch.context() as patch:
        patch.setattr(run_memory.time, "monotonic", lambda: theirs)
        other = history_of(events, node="other")
        restarted(other, theirs - 7.0)
        other.proved_by("trainer", 5, theirs - 3.0)
    took_over, mine = history_of(events, node="this"), time.monotonic()
    restarted(took_over, mine)
    for history in (took_over, history_of(events, node="this")):
        first, second = (attempt.at for attempt in history.attempts)
        assert second == mine
        assert 6.0 < mine - first < HOUR_S
        assert 2.0 < mine - history.memory.proved["trainer"] < HOUR_S


def test_clocks_that_agree_are_left_alone(events):
    at = time.monotonic()
    restarted(history_of(events, node="other"), at)
    assert [one.at for one in history_of(events, node="this").attempts] == [at]


def test_a_restore_that_failed_is_no_collapse_after_one(events):
    """Two damaged checkpoints and one collapse ended the run: "3 times: restoring does not help"."""
    history = history_of(events)
    collapse = Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason="fell", since=1.0, onset_step=50)
    settings = RunConfig(experiment_name="e").restore
    for step in (39, 29):
        tried = RepairAttempt(
            at=1.0, cause=collapse.cause, subject="trainer", rung=Rung.RESTORE, onset_step=50, restored_step=step
        )
        history.attempted(tried)
        action = RestoreTrainer(global_step=step, reason="fell", onset_step=50)
        history.begun(action)
        history = history_of(events)  # it is one that took over which hears how it ended
        history.failed(action, "a hash differs", 1.0)
    assert [one.restored_step for one in history.attempts] == [None, None]
    assert history.attempts == history_of(events).attempts, "a successor knows the same"
    sound = CheckpointFacts(global_step=19, status=CheckpointStatus.GOOD)
    assert choose([sound], collapse, history.attempts, settings).global_step == 19
    history.attempted(dataclasses.replace(tried, restored_step=19))
    assert history.attempts[-1].restored_step == 19, "one that is under way counts"


@pytest.mark.parametrize("is_started_again", [True, False])
def test_a_server_that_was_given_up_and_then_restarted_with_the_fleet_is_no_longer_given_up(events, is_started_again):
    """The next Coordinator took it for given up while it served, and ended it."""
    history = history_of(events)
    history.started_server("server-0", 0, 0, 1)
    history.done(AbandonServer(name="server-0", reason="its restarts are spent"), {}, 0.1)
    if is_started_again:
        history.started_server("server-0", 1, 0, 1)
    expected = set() if is_started_again else {"server-0"}
    assert history_of(events).memory.abandoned == history.memory.abandoned == expected


# ── the file ──


async def test_one_of_another_node_waits_for_its_end_and_knows_what_it_decided_meanwhile(events, monkeypatch):
    """It read first and waited then: what was decided in between was forgotten, and spent twice."""
    before = history_of(events, node="other")
    before.placed("other")
    waits = []

    async def slept(seconds):
        waits.append(seconds)
        before.started_server("server-0", 3, 0, 1)
        before.save()

    monkeypatch.setattr("actors.supervision.coordinator_actor.asyncio.sleep", slept)
    monkeypatch.setattr("actors.supervision.coordinator_actor.lease_of", lambda config: 5.0)
    monkeypatch.setattr("actors.supervision.coordinator_actor.this_node", lambda: "this")
    file = MemoryFile(events.with_name("memory.json"), "this")
    memory = await take_place(RunConfig(experiment_name="e"), file, 1, events)
    assert (len(waits), memory.generations) == (1, {"server-0": 3})


async def test_an_incident_that_the_journal_has_and_the_memory_not_yet_is_not_begun_again(events):
    """The memory is written behind the journal: a Coordinator that was killed between the two left it without."""
    history = history_of(events)
    for subject in ("server-0", "server-1", "server-2"):
        history.incident_began(Trouble(cause=Cause.SERVER_CRASH, subject=subject, reason=""), "", now=1.0)
    history.save()
    for number, subject in ((1, "server-0"), (9, "server-9")):
        line = {"event": "incident.ended", "attempt": 1, "incident": number, "subject": subject}
        append_line(events, line)
    began = {"event": "incident.began", "attempt": 1, "cause": "server_hang", "subject": "server-3", "at": 2.0}
    append_line(events, {**began, "incident": 4})
    append_line(events, {**began, "incident": 5, "attempt": 2})
    append_line(events, {**began, "incident": 6, "cause": "no cause"})
    append_line(events, {**began, "incident": 7, "cause": []})
    file = MemoryFile(events.with_name("memory.json"), "n")
    memory = await take_place(RunConfig(experiment_name="e"), file, 1, events)
    assert {number: one.subject for number, one in memory.incidents.open.items()} == {
        2: "server-1",
        3: "server-2",
        4: "server-3",
    }
    assert memory.incidents.lines[4][0]["event"] == "incident.began"
    assert memory.incidents.number_to_begin("server-5") == 5


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1", b'{"memory": {"attempt": "x"}}', b"\xff"])
def test_a_memory_that_can_not_be_read_is_said_and_never_taken_for_a_new_run(tmp_path, content):
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.logs.mkdir(parents=True)
    append_line(paths.events, {"event": "incident.began", "incident": 6, "attempt": 1})
    if content is not None:
        paths.run_memory.write_bytes(content)
    with pytest.raises(RunError, match=r"memory\.json can't be read: (?s:.*)the same command begins a new one"):
        MemoryFile(paths.run_memory, "n").read(1)
    assert ("can't be read" in begin_memory(paths, 2)) is (content is not None), "a first attempt has none"
    begun = MemoryFile(paths.run_memory, "n").read(2)
    assert begun.incidents.number_to_begin("server-0") == 7, "another attempt goes on with the numbers"


def test_what_is_no_event_ends_no_start(tmp_path):
    """A name that is a list ended each further attempt of a command, and a number of 60 bits was continued from."""
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.logs.mkdir(parents=True)
    for number in (6, 2**60, True, "9", [1]):
        append_line(paths.events, {"event": "server.died", "incident": number, "attempt": 1})
    append_line(paths.events, {"event": ["trainer.starting"], "incident": 7, "attempt": 1})
    begin_memory(paths, 2, has_command=True)
    begun = MemoryFile(paths.run_memory, "n").read(2)
    assert (begun.incidents.number_to_begin("server-0"), begun.command_events) == (7, [])


@pytest.mark.parametrize("has_command", [True, False])
def test_the_events_that_a_command_is_continued_from_outlive_its_attempt(tmp_path, has_command):
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.logs.mkdir(parents=True)
    for name in ("trainer.starting", "run.paused"):  # by a version that had no memory.json
        append_line(paths.events, {"event": name, "attempt": 1})
    for attempt in (2, 3):
        begin_memory(paths, attempt, has_command=has_command)
        file = MemoryFile(paths.run_memory, "n")
        history = RunHistory(Journal(paths.events, attempt), file.read(attempt), file)
        for name in ("checkpoint.condemned", "door.died"):
            history.event(name, subject="trainer", reason="")
        history.save()
    kept = [(line["event"], line["attempt"]) for line in file.read(3).command_events or ()]
    expected = [("trainer.starting", 1), ("checkpoint.condemned", 2), ("checkpoint.condemned", 3)]
    assert kept == (expected if has_command else [])


def test_of_a_command_without_a_memory_the_journal_s_events_are_thinned_as_the_memory_s_are(tmp_path):
    """One that had started again and again filled the file with its starts."""
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.logs.mkdir(parents=True)
    names = ("trainer.starting", "checkpoint.condemned", "run.running", "trainer.starting", "checkpoint.condemned")
    for step, name in enumerate(names):
        append_line(paths.events, {"event": name, "attempt": 1, "global_step": step})
    remembered = RunMemory(attempt=1, command_events=[])
    for line in read_lines(paths.events):
        remembered.keep_event(line)
    begin_memory(paths, 2, has_command=True)
    found = MemoryFile(paths.run_memory, "n").read(2).command_events
    assert [line["global_step"] for line in found] == [1, 2, 3, 4]
    assert found == remembered.command_events


def test_a_memory_of_another_attempt_is_said(events):
    file = MemoryFile(events.with_name("memory.json"), "n")
    file.write(RunMemory(attempt=3))
    with pytest.raises(RunError, match="is of attempt 3, not of attempt 2"):
        file.read(2)


def test_another_attempt_remembers_the_incidents_alone(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.logs.mkdir(parents=True)
    assert begin_memory(paths, 1) == ""
    first = history_of(paths.events, 1)
    first.begun(Halt(reason="old"))
    restarted(first, 1.0)
    first.incidents.begin(4, Cause.CHECKPOINT_CORRUPT, "checkpoint 9", 1.0)
    first.save()
    assert begin_memory(paths, 2) == ""
    second = MemoryFile(paths.run_memory).read(2)
    assert (second.ending, second.attempts, second.incidents.open) == (None, [], {})
    assert ([*second.incidents.left_open], second.incidents.damaged) == ([4], {"checkpoint 9"})
    assert second.incidents.number_to_begin("server-0") == 5


def test_what_a_full_disk_refused_is_written_when_there_is_room(events, monkeypatch):
    history = history_of(events)
    with monkeypatch.context() as patch:

        def refuses(path, data, **_):
            raise OSError(28, "No space left on device")

        patch.setattr(run_memory, "replace_file", refuses)
        history.started_server("server-0", 0, 0, 1)
    assert not events.with_name("memory.json").exists()
    history.save()
    assert history_of(events).memory.generations == {"server-0": 0}


def test_the_lines_are_on_the_disk_before_the_memory_that_continues_from_them(events, monkeypatch):
    """Else a successor would end an incident that nobody was told of."""
    seen, replace = [], run_memory.replace_file

    def replaced(path, data, **more):
        seen.append(len(list(read_lines(events))))
        replace(path, data, **more)

    monkeypatch.setattr(run_memory, "replace_file", replaced)
    history = history_of(events, journal=Journal(events, 1))
    restarted(history, 1.0)
    restarted(history, 2.0)
    assert seen == [1, 2]
    assert json.loads(events.with_name("memory.json").read_bytes())["node"] == "n"


def test_a_coordinator_that_outlives_its_driver_does_not_write_over_the_memory_of_the_next_attempt(tmp_path):
    """The next attempt found a memory "of attempt 1, not of attempt 2", and the run ended for a person."""
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.logs.mkdir(parents=True)
    begin_memory(paths, 1)
    left = history_of(paths.events, 1)
    begin_memory(paths, 2)
    left.started_server("server-0", 3, 0, 1)  # its driver was killed, and it has not ended yet
    assert MemoryFile(paths.run_memory).read(2).generations == {}
    with pytest.raises(RunError, match="is of attempt 2"):
        asyncio.run(left.secure())
    MemoryFile(paths.run_memory).write(RunMemory(attempt=2, servers=4))
    assert MemoryFile(paths.run_memory).read(2).servers == 4, "its own is written"


def test_a_restore_that_was_lost_is_not_counted_where_a_server_was_restarted_with_it(events):
    """The repair of the server was taken for the one of the restore: a restore that never reached the trainer counted
    as a collapse after one, and the third ended the run."""
    history = history_of(events)
    restore = RepairAttempt(
        at=1.0, cause=Cause.REWARD_COLLAPSE, subject="trainer", rung=Rung.RESTORE, onset_step=50, restored_step=39
    )
    history.attempted(restore)
    restarted(history, 1.0)
    history.begun(RestoreTrainer(global_step=39, reason="fell", onset_step=50))
    took_over = history_of(events)
    took_over.lost_restore()
    assert [one.subject for one in took_over.attempts] == ["server-0"]


@pytest.mark.parametrize("health", [Health.DEAD, Health.HEALTHY], ids=["ended", "chosen again"])
def test_the_first_restore_of_a_command_is_lost_too_with_the_coordinator_that_ordered_it(events, health):
    """Its door has had one lineage from the beginning: the first restore seemed to be carried out."""
    history = history_of(events)
    history.attempted(
        RepairAttempt(at=1.0, cause=Cause.TRAINER_CRASH, subject="trainer", rung=Rung.RESTORE, restored_step=39)
    )
    history.begun(RestoreTrainer(global_step=39, reason="it crashed"))
    seen = TrainerFacts(
        verdict=Verdict(health=health, reason="as seen"),
        is_loaded=health is Health.HEALTHY,
        is_paused=True,
        policy_version=0,
        lineage=LINEAGE,
        next_step=40,
        is_command=True,
    )
    took_over = history_of(events)
    assert took_over.memory.has_lost_a_restore(seen)
    took_over.lost_restore()
    assert took_over.attempts == []
    assert not took_over.memory.has_lost_a_restore(seen)


async def test_nothing_is_begun_that_the_disk_does_not_know_of(events, monkeypatch):
    """The disk had room for the line of an event and none for the memory: a server was started again of which a
    Coordinator that takes over knew nothing."""
    history = history_of(events)
    with monkeypatch.context() as patch:

        def refuses(path, data, **_):
            raise OSError(28, "No space left on device")

        patch.setattr(run_memory, "replace_file", refuses)
        history.started_server("server-0", 0, 0, 1)
        with pytest.raises(DiskError, match=r"memory\.json can't be written: No space left on device"):
            await history.secure()
        refusal = history.refusal
        assert refusal is not None
        assert (refusal.path, refusal.fault) == (str(events.parent), DiskFault.FULL)
    await history.secure()
    assert history.refusal is None


def test_numbers_of_incidents_go_on_where_the_memory_is_behind_the_events(tmp_path):
    """A killed Coordinator had written the line of an incident and not the memory, or an older version of this project
    went on with the run: the next incident had the same number, and wrote over the folder of the first."""
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.logs.mkdir(parents=True)
    begin_memory(paths, 1)
    append_line(paths.events, {"event": "incident.began", "incident": 6, "attempt": 1})
    begin_memory(paths, 2)
    assert MemoryFile(paths.run_memory).read(2).incidents.number_to_begin("server-0") == 7


def test_a_run_of_many_repairs_remembers_those_that_may_count_and_no_more(events):
    """All of them were written again with each change, of a week's run thousands."""
    history = history_of(events)
    collapse = RepairAttempt(
        at=0.5, cause=Cause.REWARD_COLLAPSE, subject="trainer", rung=Rung.RESTORE, onset_step=50, restored_step=39
    )
    history.attempted(collapse)
    ordered = RestoreTrainer(global_step=39, reason="fell", onset_step=50)
    history.begun(ordered)
    history.done(ordered, {}, 1.0)
    for number in range(1, 200):
        end = ServerExit(name="server-0", generation=number, pid=number, reason="killed", exit_code=-9, age_s=0.0)
        history.server_died(end)
        restarted(history, float(number))
        history.proved_by("server-0", number, number + 0.5)
        history.proved_by("trainer", number, number + 0.5)
    restarted(history, 300.0)
    history.save()
    after = history_of(events)
    assert [one.at for one in after.attempts] == [0.5, 199.0, 300.0], "a collapse at that place may come again"
    assert after.memory.died == {("server-0", 198), ("server-0", 199)}


def test_a_restore_under_way_keeps_its_place_among_the_repairs(events):
    history = history_of(events)
    for at in (1.0, 2.0):
        restarted(history, at)
        history.proved_by("server-0", 5, at + 0.5)
    restore = RepairAttempt(at=3.0, cause=Cause.TRAINER_CRASH, subject="trainer", rung=Rung.RESTORE, restored_step=39)
    history.attempted(restore)
    history.begun(RestoreTrainer(global_step=39, reason="it died"))
    restarted(history, 4.0)
    history.proved_by("server-0", 6, 4.5)
    history.lost_restore()
    assert [(one.subject, one.at) for one in history.attempts] == [("server-0", 2.0), ("server-0", 4.0)]
