"""One run as its files grow: live, silent, over; a restore; another run in its place."""

import json
import shutil

from launcher.reporting.current_status import CurrentStatusFile, DriverFacts
from launcher.reporting.figures import Window
from launcher.run_files.run_paths import RunLock
from scripts.watch_page import watched_run
from scripts.watch_page.watched_run import SeenOnPage, WatchedRun
from tests.support.long_run import LongRun

NOTHING = SeenOnPage(window=Window())


def append(path, *lines):
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def step(number, *, at=1000.0, reward=0.5):
    return {"global_step": number, "attempt": 1, "time": at + number, "rollout/reward": reward, "timeperf/step_s": 1.0}


def started(paths):
    append(paths.events, {"event": "run.started", "time": 1000.0, "attempt": 1})
    append(paths.events, {"event": "run.running", "state": "RUNNING", "time": 1001.0, "attempt": 1})


def seen(answer):
    x = answer["curves"]["x"]
    return SeenOnPage(
        generation=answer["generation"],
        facts=answer["facts"],
        since=int(x[-1]) if x else None,
        width=answer["curves"]["width"],
        window=Window(),
    )


def test_a_run_that_has_written_nothing_yet(paths):
    said = WatchedRun(paths).answer(NOTHING)
    assert (said["status"][0], said["last_step"], said["curves"]["x"]) == ("NOT STARTED", None, [])
    started(paths)
    with RunLock(paths):
        said = WatchedRun(paths).answer(NOTHING)
    assert (said["status"][0], said["life"]["live"]) == ("RUNNING", True)


def test_new_steps_alone_are_sent(paths):
    started(paths)
    append(paths.metrics, *map(step, range(5)))
    run = WatchedRun(paths)
    first = run.answer(NOTHING)
    append(paths.metrics, step(5), step(6))
    second = run.answer(seen(first))
    assert second["curves"]["x"] == [4.0, 5.0, 6.0]
    assert "undone" not in second["curves"]
    assert second["generation"] == first["generation"]
    assert second["last_step"] >= first["last_step"]


def test_after_a_restore_everything_is_sent_again(paths):
    started(paths)
    append(paths.metrics, *map(step, range(8)))
    run = WatchedRun(paths)
    first = run.answer(NOTHING)
    append(paths.metrics, step(5, reward=0.9))
    second = run.answer(seen(first))
    assert second["generation"] != first["generation"]
    assert second["curves"]["x"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [at for at, _ in second["curves"]["undone"]] == [5.0, 6.0, 7.0]


def test_facts_are_not_worked_out_at_every_question(paths, monkeypatch):
    counted = []
    made = watched_run.facts_of_run
    monkeypatch.setattr(watched_run, "facts_of_run", lambda *given: counted.append(1) or made(*given))
    monkeypatch.setattr(watched_run, "PAUSE_FACTOR", 1e9)
    started(paths)
    append(paths.metrics, step(0))
    run = WatchedRun(paths)
    for number in range(1, 6):
        append(paths.metrics, step(number))
        assert len(run.answer(NOTHING)["curves"]["x"]) == number + 1, "curves come from the lines themselves"
    assert len(counted) == 1


def test_another_run_in_its_place_is_read_anew(paths):
    LongRun(paths, steps=60, incidents=2).write()
    run = WatchedRun(paths)
    first = run.answer(NOTHING)
    shutil.rmtree(paths.logs)
    paths.prepare()
    LongRun(paths, steps=40, incidents=1).write()
    shutil.copy(paths.events, paths.logs / "copy")
    (paths.logs / "copy").replace(paths.events)  # another inode for certain
    second = run.answer(seen(first))
    assert (second["last_step"], len(second["incidents"])) == (39, 1)


# ── is anybody there? ──


def beat(paths, times=1):
    file = CurrentStatusFile(paths, DriverFacts.of_this_process(paths, 1, address="local", is_detached=False))
    for _ in range(times):
        file._written_at = float("-inf")
        file.write_if_due()
        file._writer.join()


def test_a_driver_that_is_gone_is_said_and_no_state_is_claimed(paths):
    started(paths)
    append(paths.metrics, step(0))
    beat(paths)
    with RunLock(paths):
        pass  # it signed, and is gone
    said = WatchedRun(paths).answer(NOTHING)
    assert (said["life"]["live"], said["status"][0], said["servers"]) == (False, "ENDED WITHOUT A STATUS", [])
    assert said["last_step_age_s"] > 0


def test_a_driver_that_is_there_and_writes_nothing_is_silent(paths, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watched_run.time, "monotonic", lambda: now[0])
    started(paths)
    with RunLock(paths):
        run = WatchedRun(paths)
        beat(paths)
        run.answer(NOTHING)
        now[0] = 40.0
        assert run.answer(NOTHING)["life"] == {"live": True, "silent_s": 40.0}
        beat(paths, 2)
        assert run.answer(NOTHING)["life"] == {"live": True, "silent_s": 0.0}


def test_on_another_machine_only_a_beat_that_is_seen_shows_life(paths, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watched_run.time, "monotonic", lambda: now[0])
    started(paths)
    with RunLock(paths):
        signed = json.loads(paths.lock.read_text())
        paths.lock.write_text(json.dumps(signed | {"host": "elsewhere"}))
        beat(paths)
        run = WatchedRun(paths)
        first = run.answer(NOTHING)
        assert (first["life"]["live"], first["status"][0]) == (None, "RUNNING WHEN LAST SEEN")
        beat(paths, 3)
        assert run.answer(NOTHING)["life"]["live"] is True
        now[0] = 40.0
        assert run.answer(NOTHING)["life"]["live"] is None
