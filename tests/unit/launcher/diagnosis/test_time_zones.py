"""Times of two clocks are brought to one, or not compared: whatever zone a log was written in, and where it is read."""

import csv
import json
import os
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from launcher.base.utc_offsets import local_offsets
from launcher.diagnosis.judging.rules import Guess
from launcher.diagnosis.judging.verdict import RunCondition
from launcher.diagnosis.reading.log_clock import STAMP, LogClock, read_stamp
from launcher.diagnosis.reading.log_records import Kind
from launcher.diagnosis.reading.unpacked import unpacked
from tests.support.worlds.diagnosis import diagnosis_of

READ_IN = ("UTC", "America/New_York", "Asia/Tokyo", "Australia/Lord_Howe")
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()
SPRING, AUTUMN = datetime(2026, 3, 29, 1, tzinfo=UTC).timestamp(), datetime(2026, 10, 25, 1, tzinfo=UTC).timestamp()
"""When Europe changes its clocks."""
BERLIN = "Europe/Berlin"
FELL, STEPS, STEP_S = 60, 120, 60
TOKENS = "Decode batch, #running-req: 16, #token: 900, gen throughput (token/s): 900.0"
REFUSED = "Cannot connect to host 127.0.0.1:31514 ssl:default [Connect call failed ('127.0.0.1', 31514)]"
MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"
)


def wall(zone, unix, form="%Y-%m-%d %H:%M:%S"):
    here = ZoneInfo(zone) if isinstance(zone, str) else timezone(timedelta(hours=zone))
    return datetime.fromtimestamp(unix, here).strftime(form)


class Run:
    """A run of ours whose server runs out of memory before step FELL; the trainer's requests are refused from there."""

    def __init__(self, folder, zone, *, begin=NOON):
        self.folder = folder
        self.zone = zone
        self.begin = begin
        folder.mkdir(parents=True)

    def at(self, step):
        return self.begin + step * STEP_S

    def reward(self, step):
        return 0.6 + 0.02 * (step % 5) if step < FELL else 0.0

    def metrics(self):
        with (self.folder / "metrics.jsonl").open("w") as out:
            for step in range(STEPS):
                reward = {"grpo_actor/task_reward/avg": self.reward(step), "rollout/reward": self.reward(step)}
                head = {"global_step": step, "attempt": 1, "lineage": 1, "time": self.at(step)}
                out.write(json.dumps({**head, **reward, "rollout/tokens": 2000.0 if step < FELL else 0.0}) + "\n")
        return self

    def started(self, offsets):
        event = {"time": self.begin - 60, "event": "run.started", "attempt": 1, "utc_offsets": offsets}
        (self.folder / "events.jsonl").write_text(json.dumps(event) + "\n")
        return self

    def trainer(self, *, steps=False, form="%Y-%m-%d %H:%M:%S,250"):
        with (self.folder / "trainer.log").open("w") as log:
            for step in range(STEPS):
                if step >= FELL:
                    log.write(f"{wall(self.zone, self.at(step) - 30, form)} trainer ERROR: {REFUSED}\n")
                if steps:
                    text = f"trainer INFO: step {step}: reward {self.reward(step):.3f}, policy_version {step + 1}"
                    log.write(f"{wall(self.zone, self.at(step) + 1, form)} {text} (Train step {step + 1})\n")
        return self

    def server(self, zone=None, *, head="", form="%Y-%m-%d %H:%M:%S", fails=True, silent=(0, 0)):
        zone, end = self.zone if zone is None else zone, self.at(FELL) if fails else self.at(STEPS)
        with (self.folder / "llm_server-0.log").open("w") as log:
            log.write(head)
            for at in range(int(self.begin), int(end) - 60, 5):
                if not silent[0] <= at - self.begin < silent[1]:
                    log.write(f"[{wall(zone, at, form)}] {TOKENS}\n")
            if fails:
                log.write(f"[{wall(zone, end - 58, form)}] Scheduler hit an exception: Traceback\n{MEMORY}\n")
        return self


def header(unix, zone):
    return f"==== generation 0, {wall(zone, unix, '%Y-%m-%dT%H:%M:%S%:z')}: python -m sglang.launch_server\n"


def utc_header(unix):
    return f"==== generation 0, {datetime.fromtimestamp(unix, UTC).isoformat()}: python -m sglang.launch_server\n"


def silences(found):
    return [one.facts["seconds"] for one in found.contents.log_events if one.kind is Kind.SILENCE]


def notes_of(found):
    return " ".join(source.note for source in found.contents.sources)


def is_memory(found):
    return found.condition is RunCondition.FELL and found.causes.first.guess is Guess.OUT_OF_MEMORY


# ── what nothing ties accuses nobody ──


def test_logs_whose_zone_nothing_shows_are_not_compared_and_accuse_nobody(tmp_path, zone):
    """Read under UTC, it was memory; under Asia/Tokyo, a server hang; under America/New_York, nothing."""
    run = Run(tmp_path / "run", 0).metrics().trainer().server()
    said = set()
    for name in READ_IN:
        zone(name)
        found = diagnosis_of(run.folder)
        said.add((found.headline, tuple((one.guess, one.score) for one in found.causes.ranked)))
        assert found.causes.first is None or not found.causes.is_sure
        assert "not compared" in notes_of(found)
        assert any("nothing shows when this was among the steps" in note for note in found.causes.missing)
        weighed = " ".join(one.text for cause in found.causes.ranked for one in (*cause.supporting, *cause.opposing))
        assert "no refused" not in weighed
        assert "no log mentions" not in weighed
    assert len(said) == 1


def test_a_failure_that_can_not_be_placed_among_the_steps_leaves_no_run_fine(tmp_path, zone):
    zone("UTC")
    run = Run(tmp_path / "run", 0)
    run.reward = lambda step: 0.6 + 0.02 * (step % 5)
    found = diagnosis_of(run.metrics().server(9).folder)
    assert found.condition is RunCondition.UNCLEAR
    assert "nothing shows when this was" in found.headline


@pytest.mark.parametrize("east_h", [5.75, -5, 9])
def test_a_servers_log_of_another_zone_that_lies_apart_from_the_trainers_accuses_nobody(tmp_path, east_h):
    """West of the trainer, its server seemed to be silent for hours; east of it, to be alive."""
    run = Run(tmp_path / "run", 0)
    found = diagnosis_of(run.trainer(steps=True).server(east_h, fails=False).folder)
    weighed = " ".join(one.text for cause in found.causes.ranked for one in (*cause.supporting, *cause.opposing))
    assert "tokens" not in weighed
    assert "they lie apart" in notes_of(found)
    here = diagnosis_of(Run(tmp_path / "here", 0).trainer(steps=True).server(0, fails=False).folder)
    assert any("continued to make tokens" in one.text for cause in here.causes.ranked for one in cause.opposing)


@pytest.mark.parametrize("east_h", [1, 5.75, -5])
def test_a_merged_log_of_machines_in_two_zones_is_placed_by_its_steps(tmp_path, east_h):
    run = Run(tmp_path / "run", 0)
    with (run.folder / "merged.log").open("w") as log:
        for step in range(STEPS):
            for at in range(int(run.at(step)) - 60, int(run.at(step)) - 10, 5) if step < FELL else ():
                log.write(f"[llm_server] [{wall(east_h, at)}] {TOKENS}\n")
            if step == FELL:
                log.write(f"[llm_server] [{wall(east_h, run.at(step) - 58)}] Scheduler hit an exception\n")
                log.write(f"[llm_server] {MEMORY}\n")
            if step >= FELL:
                log.write(f"[trainer] {wall(0, run.at(step) - 30)},250 trainer ERROR: {REFUSED}\n")
            text = f"trainer INFO: step {step}: reward {run.reward(step):.3f}, policy_version {step + 1}"
            log.write(f"[trainer] {wall(0, run.at(step))},250 {text} (Train step {step + 1})\n")
    found = diagnosis_of(run.folder)
    weighed = [one.text for cause in found.causes.ranked for one in (*cause.supporting, *cause.opposing)]
    assert "several clocks" in notes_of(found)
    assert not [text for text in weighed if "tokens" in text]
    assert found.causes.first.guess is Guess.OUT_OF_MEMORY
    assert found.condition is RunCondition.FELL


# ── what ties a log to unix seconds ──


@pytest.mark.parametrize(("name", "east_h"), [*zip(READ_IN, [5.75, 9, -3.5, 0], strict=True)])
@pytest.mark.parametrize("tie", ["recorded", "steps", "zone in its dates"])
def test_the_cause_is_the_same_wherever_it_is_written_and_read(tmp_path, zone, name, east_h, tie):
    run = Run(tmp_path / "run", east_h).metrics()
    match tie:
        case "recorded":
            run.started([[NOON - 60, int(east_h * 3600)], [NOON + 90_000, 0]]).trainer().server()
        case "steps":
            run.trainer(steps=True).server()
        case _:
            run.trainer(form="%Y-%m-%dT%H:%M:%S.250000%:z").server(form="%Y-%m-%d %H:%M:%S%z")
    zone(name)
    found = diagnosis_of(run.folder)
    assert is_memory(found), found.headline
    assert ("taken as UTC" in notes_of(found)) == (tie == "steps")
    if tie == "recorded":
        assert found.onset.time == wall(east_h, run.at(FELL))


def test_what_the_steps_show_counts_where_the_run_wrote_down_the_zone_of_another_machine(tmp_path, zone):
    zone("UTC")
    run = Run(tmp_path / "run", 9).metrics().started([[NOON - 60, -18_000]]).trainer(steps=True)
    assert is_memory(diagnosis_of(run.server(head=utc_header(NOON)).folder))
    assert is_memory(diagnosis_of(run.server(5.5, head=utc_header(NOON)).folder))


def test_dates_with_a_zone_in_one_file_and_none_in_the_others(tmp_path, zone):
    zone("America/New_York")
    run = Run(tmp_path / "run", 9).metrics().trainer(steps=True).server(0, form="%Y-%m-%dT%H:%M:%SZ")
    assert is_memory(diagnosis_of(run.folder))


def test_areals_log_and_wandbs_table_by_the_steps_that_both_have(tmp_path, zone):
    zone("Asia/Tokyo")
    run = Run(tmp_path / "run", -3.5).trainer(steps=True).server()
    with (run.folder / "wandb.csv").open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(["_step", "_timestamp", "ppo_actor/task_reward/avg"])
        rows.writerows([step, run.at(step), run.reward(step)] for step in range(20, STEPS))
    found = diagnosis_of(run.folder)
    assert is_memory(found)
    assert "taken as UTC-03:30: by that its steps agree" in notes_of(found)


def test_steps_that_agree_on_no_offset_tie_nothing(tmp_path, zone):
    zone("UTC")
    run = Run(tmp_path / "run", 9).metrics()
    at = run.at
    run.at = lambda step: at(step) * 3 - 2 * at(0)
    run.trainer(steps=True)
    run.at = at
    assert "not compared" in notes_of(diagnosis_of(run.server().folder))


# ── our own header ──


@pytest.mark.parametrize("east_h", [0, 5.75, -5, 12, -3.5])
@pytest.mark.parametrize("is_utc", [True, False])
def test_a_servers_header_of_another_zone_than_its_lines_is_no_silence_and_hides_none(tmp_path, zone, east_h, is_utc):
    zone("Asia/Kathmandu")
    head = utc_header(NOON - 20) if is_utc else header(NOON - 20, east_h)
    run = Run(tmp_path / "run", east_h).trainer(steps=True)
    found = diagnosis_of(run.server(head=head, silent=(1200, 2400)).folder)
    assert silences(found) == [1205.0]


# ── clocks that are changed in spring and in autumn ──


@pytest.mark.parametrize("change", [SPRING, AUTUMN])
@pytest.mark.parametrize("tie", ["recorded", "steps", "header"])
def test_a_change_of_summer_time_is_no_pause_and_hides_none(tmp_path, zone, change, tie):
    run = Run(tmp_path / "run", BERLIN, begin=change - 70 * STEP_S)
    run.reward = lambda step: 0.6 + 0.02 * (step % 5)
    head = utc_header(run.begin) if tie == "header" else ""
    run.metrics().trainer(steps=tie != "header").server(head=head, fails=False, silent=(300, 1500))
    if tie == "recorded":
        zone(BERLIN)
        run.started(local_offsets(run.begin - 3600))
    zone("America/New_York")
    found = diagnosis_of(run.folder)
    assert silences(found) == [1205.0]
    assert found.condition is not RunCondition.STALLED
    (event,) = [one for one in found.contents.log_events if one.kind is Kind.SILENCE and one.facts["seconds"] < 3000]
    assert event.time == run.begin + 295


@pytest.mark.parametrize("name", ["UTC", "Asia/Tokyo"])
def test_a_failure_in_the_hour_that_comes_twice_is_where_it_was(tmp_path, zone, name):
    run = Run(tmp_path / "run", BERLIN, begin=AUTUMN - (FELL - 20) * STEP_S)
    run.metrics().trainer(steps=True).server()
    zone(name)
    found = diagnosis_of(run.folder)
    assert is_memory(found)
    (ended,) = [one for one in found.contents.log_events if one.kind is Kind.SERVER_EXCEPTION]
    assert ended.time == run.at(FELL) - 58


def test_an_hour_that_comes_twice_in_a_log_that_nothing_ties(tmp_path):
    run = Run(tmp_path / "run", BERLIN, begin=AUTUMN - 90 * STEP_S)
    run.reward = lambda step: 0.6 + 0.02 * (step % 5)
    found = diagnosis_of(run.trainer(steps=True).server(fails=False, silent=(5500, 6700)).folder)
    assert silences(found) == [1205.0]
    assert (found.contents.steps.times[1:] > found.contents.steps.times[:-1]).all()


def test_an_hour_that_is_missing_in_all_logs_in_the_night_of_the_change_is_no_pause(tmp_path):
    run = Run(tmp_path / "run", BERLIN, begin=SPRING - 70 * STEP_S)
    run.reward = lambda step: 0.6 + 0.02 * (step % 5)
    found = diagnosis_of(run.trainer(steps=True).server(fails=False, silent=(300, 1500)).folder)
    assert silences(found) == [1205.0]
    assert found.condition is not RunCondition.STALLED


def test_a_missing_hour_that_another_log_has_is_a_pause(tmp_path):
    run = Run(tmp_path / "run", 1, begin=SPRING - 20 * STEP_S)
    run.reward = lambda step: 0.6 + 0.02 * (step % 5)
    found = diagnosis_of(run.trainer(steps=True).server(fails=False, silent=(1200, 4800)).folder)
    assert silences(found) == [3605.0]


# ── single dates ──


@pytest.mark.parametrize(
    ("text", "unix"),
    [
        ("2026-11-20T12:00:00Z", NOON),
        ("2026-11-20 12:00:00,250", None),
        ("2026-11-20T17:45:00.123456789+05:45", NOON + 0.123456789),
        ("2026-11-20 07:00:00 -0500", NOON),
        ("20261120-12:00:00 UTC", NOON),
        ("[2026-11-20 12:00:00 TP0]", None),
        ("2026-11-20 12:00:00 -12 tokens", None),
    ],
)
def test_dates(text, unix):
    seconds, has_zone = read_stamp(STAMP.search(text.encode()))
    assert (seconds if has_zone else None) == (unix if unix is None else pytest.approx(unix, rel=0, abs=1e-5))


def test_one_line_that_comes_late_is_no_clock_that_was_put_back():
    lines = [f"2026-10-25 02:{minute:02d}:00 a\n" for minute in range(50)]
    late = ["2026-10-25 02:10:00 from another process\n"]
    clock = LogClock()
    clock.note_dates(
        "".join([*lines, *late, *(f"2026-10-25 02:{minute:02d}:30 b\n" for minute in range(50, 59))]).encode()
    )
    assert not clock.put_back


@pytest.mark.parametrize("name", READ_IN)
def test_a_kernels_line_is_of_the_year_in_which_its_file_was_written_in_any_zone(tmp_path, zone, name):
    """A day ahead of the reader's, it was a year old; a kill at New Year was of the year to come."""
    zone(name)
    log = tmp_path / "kern.log"
    changed = datetime(2026, 12, 31, 20, tzinfo=UTC).timestamp()
    log.write_text("Dec 31 23:59:00 host kernel: a\nJan  1 05:00:00 host kernel: b\n")
    os.utime(log, (changed, changed))
    lines = unpacked(log, tmp_path)[0].read_text().splitlines()
    assert [line[:10] for line in lines] == ["2026-12-31", "2027-01-01"]
