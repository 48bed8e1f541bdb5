"""The Coordinator's incidents over a model of a run: begun once, ended once, also by its successor; with a folder."""

import json
import signal
import subprocess
import sys

import psutil
import pytest

from actors.supervision import incident_artifacts
from actors.supervision.incident_artifacts import ArtifactCollector
from actors.training import rejections
from actors.training.rejections import MOST_FILES, Rejections
from launcher.base.messages import Cause
from launcher.policy.actions import RestartServer
from launcher.policy.admission import Admission
from launcher.policy.incident_policy import Trouble
from launcher.run_files.journal import Journal, read_lines
from tests.support.replay import Replay, prompts
from tests.support.run_memory import history_of
from tests.support.worlds.policy import OneTake
from tests.support.worlds.supervision import SLEEPER, Trial, patience

__all__ = ["patience"]


def told(trial):
    """(event, number, cause, subject, mended) of all incidents."""
    lines = [*trial.events("incident.began"), *trial.events("incident.ended")]
    lines.sort(key=lambda event: event["time"])
    return [(e["event"].rpartition(".")[2], e["incident"], e["cause"], e["subject"], e.get("is_mended")) for e in lines]


async def test_a_crash_is_one_incident_with_what_was_done_and_how_long_it_took(tmp_path):
    trial = await Trial(tmp_path).begun()
    trial.run.step(7)
    trial.run.kill_server("server-1")
    await trial.turns()
    assert told(trial) == [
        ("began", 1, "server_crash", "server-1", None),
        ("ended", 1, "server_crash", "server-1", True),
    ]
    (began,), (ended,) = trial.events("incident.began"), trial.events("incident.ended")
    assert began["doing"] == "it is being restarted"
    assert ended["seconds"] > 0
    assert [action.split(" in ")[0] for action in ended["actions"]] == [
        "server-1: server.restarted",
        "server-1: server.loaded",
        "server-1: server.ready",
    ]
    mine = {e["event"] for e in read_lines(trial.path) if e["incident"] == 1}
    assert mine >= {"repair.begun", "server.restarting", "server.restarted", "server.loaded", "server.ready"}


async def test_what_an_attempt_that_was_killed_left_open_is_closed_by_the_next(tmp_path):
    before = history_of(tmp_path / "events.jsonl", 0)
    before.incidents.last = 3
    before.incident_began(Trouble(cause=Cause.SERVER_HANG, subject="server-0", reason="stopped"), "", 1.0)
    before.save()
    trial = Trial(tmp_path)
    trial.coordinator._incidents.begin()
    await trial.begun()
    trial.run.kill_server("server-0")
    await trial.turns()
    assert told(trial)[1] == ("ended", 4, "server_hang", "server-0", False)
    assert [line[1] for line in told(trial)] == [4, 4, 5, 5]


# ── its folder ──


BATCH = Replay(prompts(4), 8).collect(OneTake(), want=4, weight_version=7)


@pytest.mark.usefixtures("patience")
async def test_a_hang_is_looked_at_before_its_process_is_ended_and_the_folder_tells_the_whole_story(paths):
    paths.server_log(0).write_text("the last line\n")
    kept = Rejections(Journal(paths.events, 1))
    kept.add(BATCH, Admission(admitted=False, reason="far", cause=Cause.SERVER_CORRUPT), 7)
    began = {"incident": 3, "cause": "server_hang", "subject": "server-0", "reason": "stopped"}
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGSTOP)  # a stopped process must not stop who looks at it
        artifacts = ArtifactCollector(paths, pids=lambda: {"server-0": process.pid})
        artifacts.began(3, began)
        await artifacts.evidence_before(RestartServer(name="server-0", reason=""))
        artifacts.joined(3, kept.since_step[0])
        artifacts.ended(3, began | {"is_mended": True, "seconds": 2.5})
        await artifacts.close()
        process.kill()
    folder = paths.incident(3)
    assert json.loads((folder / "incident.json").read_text())["seconds"] == 2.5
    assert (folder / "server-0.log.tail").read_text() == "the last line\n"
    assert "waits_for_nothing" in (folder / "stacks" / "server-0.txt").read_text()
    (batch,) = folder.glob("batch-*.json")
    shown = json.loads(batch.read_text())
    assert (len(shown["groups"]), len(shown["groups"][0]["rollouts"])) == (4, 8)


@pytest.mark.usefixtures("patience")
async def test_a_coordinator_after_a_killed_one_gathers_what_is_missing_but_no_stack_of_a_later_process(paths):
    paths.server_log(0).write_text("the last line\n")
    paths.incident(3).mkdir(parents=True)
    (paths.incident(3) / "incident.json").write_text('{"by": "the one that was killed"}')
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        started = psutil.Process(process.pid).create_time()

        async def gathered(number, time):
            artifacts = ArtifactCollector(paths, pids=lambda: {"server-0": process.pid})
            artifacts.began(number, {"cause": "server_hang", "subject": "server-0", "time": time})
            await artifacts.evidence_before(RestartServer(name="server-0", reason=""))
            await artifacts.close()

        await gathered(3, started - 1.0)
        await gathered(4, started + 1.0)
        process.kill()
    assert "killed" in (paths.incident(3) / "incident.json").read_text()
    assert (paths.incident(3) / "server-0.log.tail").read_text() == "the last line\n"
    assert not (paths.incident(3) / "stacks").exists()
    assert "waits_for_nothing" in (paths.incident(4) / "stacks" / "server-0.txt").read_text()


async def test_where_nothing_can_be_written_nothing_is_hurt(paths):
    paths.incidents.write_text("a file in its place")
    kept = Rejections(Journal(paths.events, 1))
    kept.add(BATCH, Admission(admitted=False, reason="no"), 7)
    assert kept.since_step[0].file == ""
    artifacts = ArtifactCollector(paths, pids=dict)
    artifacts.began(1, {"cause": "server_hang", "subject": "server-0"})
    artifacts.joined(1, kept.since_step[0])
    artifacts.ended(1, {})
    await artifacts.close()
    assert paths.incidents.read_text() == "a file in its place"


async def test_beyond_the_folders_that_a_run_may_have_the_end_of_an_incident_makes_none(paths, monkeypatch):
    """A run of a million steps with a killed server in each thousand had a folder for each."""
    monkeypatch.setattr(incident_artifacts, "MOST_FOLDERS", 2)
    artifacts = ArtifactCollector(paths, pids=dict)
    for number in range(1, 6):
        artifacts.began(number, {"cause": "server_crash", "subject": "server-0"})
        artifacts.ended(number, {"is_mended": True})
    await artifacts.close()
    ends = [json.loads((folder / "incident.json").read_text()) for folder in paths.incidents.iterdir()]
    assert ends == [{"is_mended": True}] * 2, "of whichever two were first: each is kept on a thread of its own"


def test_rejections_are_known_until_a_step_is_committed_and_suspicions_until_they_settle(paths):
    kept = Rejections(Journal(paths.events, 1))
    for cause in (Cause.NONFINITE, Cause.REWARD_COLLAPSE):
        kept.add(BATCH, Admission(admitted=False, reason="no", cause=cause), 7)
    kept.committed(7)
    assert [one.cause for one in kept.since_step] == [Cause.REWARD_COLLAPSE]
    kept.committed(10)
    assert not kept.since_step


def test_a_batch_that_is_too_large_is_shown_in_part_and_stays_json(monkeypatch):
    monkeypatch.setattr(rejections, "MOST_BATCH_BYTES", 2 * len(rejections.batch_as_json(BATCH)) // 3)
    shown = json.loads(rejections.batch_as_json(BATCH))
    assert 0 < len(shown["groups"]) < 4
    assert shown["groups_shown"] == f"{len(shown['groups'])} of 4"


def test_batches_that_wait_for_their_incident_do_not_pile_up(paths):
    kept = Rejections(Journal(paths.events, 1))
    for _ in range(MOST_FILES + 3):
        kept.add(BATCH, Admission(admitted=False, reason="no"), 7)
    assert len(list((paths.incidents / "rejected").iterdir())) == MOST_FILES
    assert len({event["rejection"] for event in read_lines(paths.events)}) == MOST_FILES + 3
