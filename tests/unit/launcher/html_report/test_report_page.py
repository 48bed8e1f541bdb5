"""The report as a browser gets it: nothing in a log can break out of it, nothing is asked for from outside, and a
damaged file keeps nobody from it."""

import json
import math
import re

import pytest

from launcher.html_report.page import STATIC, policy, render_page
from launcher.html_report.page_facts import FORMAT, page_facts
from launcher.html_report.report_writer import LONGEST_SAMPLES, write_report
from launcher.reporting.figures import charts_of
from launcher.reporting.run_facts import facts_of
from launcher.run_files.journal import append_line
from tests.support.hostile_text import BIDI
from tests.support.long_run import LongRun
from tests.support.report_parts import T0, Elements, event, facts, facts_in, facts_of_page, started, step

BAD = """'"><script>alert(1)</script><!--<img src=x onerror=alert(2)>&lt;\u202e\x00"""


def malicious_data():
    data = started(range(40), every_s=1)
    event(data, "incident.began", 50, incident=1, cause=BAD, subject=BAD, reason=BAD, doing=BAD, onset_step=3)
    event(data, "incident.ended", 55, incident=1, is_mended=False, reason=BAD, actions=[BAD])
    event(data, "incident.began", 56, incident=2, cause="server_crash", subject=BAD, reason=BAD)
    event(data, "trainer.restored", 57, global_step=30, reason=BAD)
    event(data, "run.running", 58, state=BAD, reason=BAD)
    event(data, "run.paused", 58, state="PAUSED", reason=BAD)
    event(data, "checkpoint.committed", 59, global_step=30, subject=BAD, seconds=BAD)
    for at in (10, 20, 30):
        data.take_memory({"time": T0 + at, "in_use": {BAD: [1e9, 2e9]}})
    data.take_ledger({"global_step": 7, "prompt_ids": [BAD, BAD], "weight_versions": [BAD]})
    data.take_step({"global_step": 40, "time": T0 + 60, "attempt": 1, BAD: 1.0})
    event(data, "run.errored", 90, reason=BAD)
    return data


def test_nothing_that_a_log_says_can_break_out_of_the_page():
    told = facts_of(malicious_data(), experiment_name=BAD, trial_name=BAD, settings={BAD: BAD})
    content = render_page(page_facts(told, is_live=None, at=T0)).decode()
    plain = Elements(render_page(page_facts(facts(started()), is_live=None, at=T0)).decode())
    assert Elements(content).found == plain.found, "the same elements, whatever the facts are"
    assert Elements(content).attributes == plain.attributes
    assert "alert(1)" not in content.partition('id="facts">')[0]
    assert "<" not in content.partition('id="facts">')[2].partition("</script>")[0]
    said = facts_in(content.encode())
    assert "<script>alert(1)</script>" in said["title"], "it is there, as the text that it is"
    assert not {"\x00", *BIDI} & {*json.dumps(said, ensure_ascii=False)}


def test_the_page_asks_nobody_for_anything_and_makes_no_markup_of_text(paths):
    LongRun(paths, steps=60, incidents=3).write()
    write_report(paths, is_live=False)
    content = "null".join(re.split(r'(?<=id="facts">).*?(?=</script>)', paths.report.read_text()))
    content = content.replace("/*! https://github.com/leeoniya/uPlot (v1.6.32) */", "")
    assert "://" not in content
    assert f'content="{policy(is_served=False)}"' in content
    assert "connect-src 'none'" in policy(is_served=False)
    assert "'unsafe" not in policy(is_served=True)
    elements = Elements(content)
    assert not [name for name, _ in elements.attributes if name.startswith("on") or name in ("style", "src")]
    assert [value for name, value in elements.attributes if name == "href"] == ["data:,"]
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(.style"
    for file in STATIC.rglob("*.js"):
        assert re.findall(markup, file.read_text()) == [], file
    assert not re.search(r"@import|url\(", content)
    assert "MIT License" in (STATIC / "uplot" / "LICENSE").read_text()


def test_the_json_has_the_figures_of_a_run(paths):
    LongRun(paths, steps=300, incidents=6, attempts=2).write()
    append_line(paths.metrics, {"global_step": 300, "time": 1.9e9, "attempt": 2, "own/<figure>": 1.5})
    told = write_report(paths, is_live=False)
    said = facts_of_page(paths)
    assert (said["format"], said["title"], said["status"][:2]) == (FORMAT, "exp / t0", ["FINISHED", "good"])
    assert said["health"] == {"incidents": 6, "mended": 6, "over": 6, "open": 0}
    assert said["steps"] == {"kept": 301, "undone": sum(map(len, told.taken_back)), "rejected": 0}
    assert [one["number"] for one in said["incidents"]] == [1, 2, 3, 4, 5, 6]
    assert sum(one["incidents"] for one in said["causes"]) == 6
    assert said["learning"]["first"] == pytest.approx(told.reward_first)
    assert said["charts"] == charts_of(told.figures.keys)
    assert {"own/<figure>", "rollout/reward"} <= said["curves"]["series"].keys()
    assert len(said["curves"]["x"]) == 301
    assert {lane["name"] for lane in said["lanes"]} == {"run", "server-0", "server-1", "incidents"}
    assert [one["number"] for one in said["attempts"]] == [1, 2]
    assert said["checkpoints"]["made"] == len(told.checkpoints)
    assert len(said["evals"]) == len(told.evals)
    assert [said["evals"][place][4] for place in (0, -1)] == [0, 2]
    assert said["settings"]["actor.optimizer.lr"] == "1.7e-05"
    assert "metrics.jsonl" in said["files"]
    used, there = said["memory"]["peaks"]["host memory"]
    assert used / there == pytest.approx(max(said["memory"]["series"]["host memory"]))


def test_steps_that_a_restore_undid_are_in_no_curve(paths):
    for number, value in ((0, 1.0), (1, 99.0), (2, 99.0), (1, 2.0)):
        line = {"global_step": number, "time": 1.8e9 + number, "attempt": 1, "rollout/reward": value}
        append_line(paths.metrics, line)
    write_report(paths, is_live=False)
    curves = facts_of_page(paths)["curves"]
    assert curves["series"]["rollout/reward"]["mean"] == [1.0, 2.0]
    assert curves["undone"] == [[1.0, 99.0], [2.0, 99.0]]


def test_the_time_is_told_in_parts():
    data = started(range(4))
    event(data, "run.finished", 100, reason="done")
    time = page_facts(facts(data), is_live=False, at=T0)["time"]
    assert (time["wall_s"], time["kept_s"], time["startup_s"]) == (100.0, 40.0, 10.0)
    assert (time["undone_s"], time["faults_s"]) == (0.0, 0.0)
    assert time["ettr"] == time["strict"] == time["semantic"] == pytest.approx(0.4)


def test_an_attempt_that_came_to_no_step_was_a_start():
    data = started(range(4))
    event(data, "run.errored", 60, reason="its node was lost")
    event(data, "run.started", 100, reason="resumed", attempt=2)
    event(data, "run.errored", 130, reason="no GPU", attempt=2)
    assert page_facts(facts(data), is_live=False, at=T0)["time"]["startup_s"] == 40.0


def test_the_completions_of_an_incident_s_step_and_the_one_before_are_in_the_file(paths):
    LongRun(paths, steps=400, incidents=5).write()
    told = write_report(paths, is_live=False)
    samples = facts_of_page(paths)["samples"]
    wanted = {399, 398, *(step for one in told.incidents for step in (one.step, one.step - 1))}
    assert {int(step) for step in samples} == wanted
    assert all(line["global_step"] == int(step) for step, lines in samples.items() for line in lines)


def test_of_a_live_run_only_the_newest_completions_are_read_and_long_ones_are_left_out(paths):
    LongRun(paths, steps=60, incidents=2).write()
    write_report(paths, is_live=True)
    assert facts_of_page(paths)["samples"].keys() == {"59", "58"}
    for number in (60, 61):
        append_line(paths.samples, {"global_step": number, "completion": "x" * (LONGEST_SAMPLES // 2)})
    write_report(paths, is_live=True)
    assert facts_of_page(paths)["samples"].keys() == {"61"}


@pytest.mark.slow
def test_a_long_run_stays_one_small_page(paths):
    LongRun(paths, steps=3000, incidents=40, attempts=2).write()
    told = write_report(paths, is_live=False)
    assert (len(told.steps), len(told.incidents), told.audit.problems) == (3000, 40, ())
    assert paths.report.stat().st_size < 800_000


# ── damage ──


def test_a_run_that_has_written_nothing_has_a_report(paths):
    write_report(paths, is_live=True)
    said = facts_of_page(paths)
    assert (said["status"][0], said["last_step"], said["curves"]["x"]) == ("NOT STARTED", None, [])


def test_torn_and_foreign_lines_are_passed_over(paths):
    LongRun(paths, steps=50, incidents=2).write()
    whole = write_report(paths, is_live=False)
    for path in (paths.metrics, paths.ledger, paths.events, paths.memory, paths.samples):
        with path.open("ab") as file:
            file.write(b'\x00\xff{"global_step": \n[1,2]\n' + b"[" * 5000 + b'\n{"global_step": 50, "atte')
    damaged = write_report(paths, is_live=False)
    assert (damaged.steps, damaged.incidents) == (whole.steps, whole.incidents)


@pytest.mark.parametrize(
    "line",
    [
        {"global_step": 1, "time": "NaN", "rollout/reward": "Infinity", "timeperf/step_s": "-Infinity"},
        {"global_step": 1, "time": 1e300, "rollout/reward": "much", "timeperf/step_s": None, "attempt": "x"},
        {"global_step": 10**9, "time": T0 + 20, "rollout/reward": 1e38, "timeperf/step_s": 1e300, "attempt": 1},
        {"global_step": True, "time": [], "rollout/reward": {}},
    ],
)
def test_any_figure_can_be_drawn(line):
    """What is no finite number is null, or a browser could not read the JSON."""
    data = started()
    step(data, 0, 10)
    data.take_step(line)
    data.take_ledger(line)
    data.take_memory({"time": line["time"], "in_use": {"host memory": ["NaN", 0]}})
    data.take_event({"event": "incident.began", "incident": 1} | line)
    data.take_event({"event": "trainer.restored", "time": 0, "global_step": -1})
    content = render_page(page_facts(facts(data), is_live=True, at=math.inf))
    assert not re.search(r"\b(NaN|Infinity)\b", json.dumps(facts_in(content)))
