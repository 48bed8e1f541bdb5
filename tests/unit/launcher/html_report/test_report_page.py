"""The report as a browser gets it: nothing in a log can break out of it, nothing is asked for from outside, and a
damaged file keeps nobody from it."""

import math
import re

import pytest
from jinja2 import UndefinedError

from launcher.html_report.page_template import render_page
from launcher.html_report.report_page import report_page
from launcher.html_report.report_writer import write_report
from launcher.html_report.svg_chart import WIDE, Plot, chart, ticks, time_ticks, value_span
from launcher.reporting.downsample import downsample, running_mean
from launcher.reporting.formats import clock_text
from launcher.reporting.run_facts import facts_of
from tests.support.long_run import LongRun
from tests.support.report_parts import T0, Elements, event, facts, started, step

BAD = """'"><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\u202e\x00"""


OURS = frozenset(
    {
        *("html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer", "div", "span", "p"),
        *("b", "a", "h1", "h2", "ul", "li", "i", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td"),
        *(
            "details",
            "figure",
            "figcaption",
            "summary",
            "code",
            "script",
            "svg",
            "g",
            "line",
            "path",
            "rect",
            "circle",
            "polygon",
            "text",
        ),
    }
)


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
    event(data, "run.errored", 90, reason=BAD)
    return data


def test_nothing_that_a_log_says_can_break_out_of_the_page():
    told = facts_of(malicious_data(), experiment_name=BAD, trial_name=BAD)
    content = report_page(told, written_at=T0, is_live=None).decode()
    elements = Elements(content)
    assert elements.found.count("script") == 1
    assert set(elements.found) <= OURS
    assert not [name for name, _ in elements.attributes if name.startswith("on") or name == "src"]
    assert "alert(1)" in elements.shown  # it is shown, as the text that it is
    assert "\x00" not in content
    assert "\u202e" not in content


def test_links_lead_to_the_runs_own_files_alone():
    told = facts_of(malicious_data(), experiment_name="e", trial_name="t", folders=frozenset({1, 2}))
    links = [
        value
        for name, value in Elements(report_page(told, written_at=T0, is_live=True).decode()).attributes
        if name == "href"
    ]
    assert "incidents/1/" in links
    assert all(re.fullmatch(r"[\w.]+/?|incidents/\d+/", link) for link in links)


def test_the_page_asks_for_nothing_from_outside(paths):
    LongRun(paths, steps=60, incidents=3).write()
    write_report(paths, is_live=False)
    content = paths.report.read_text()
    assert "://" not in content
    assert "default-src &#39;none&#39;" in content
    assert not re.search(r"@import|url\(|<link|<iframe|<img", content)


def test_its_tiles_lead_with_what_is_asked_first(paths):
    LongRun(paths, steps=60, incidents=3).write()
    write_report(paths, is_live=False)
    shown = Elements(paths.report.read_text()).shown
    places = [shown.index(words) for words in ("learning: reward", "health: of 3 incidents", "lost: ", "steps kept")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("steps", "words"), [(10, "learning: reward of 10 steps"), (60, "learning: reward of the first and")]
)
def test_of_a_few_steps_no_change_is_told(paths, steps, words):
    LongRun(paths, steps=steps, incidents=0).write()
    write_report(paths, is_live=False)
    shown = Elements(paths.report.read_text()).shown
    assert words in shown
    tile = shown[shown.index(words) - 30 : shown.index(words)]
    assert ("→" in tile) is (steps > 10)


def test_each_picture_has_its_wide_and_its_narrow_form(paths):
    LongRun(paths, steps=60, incidents=3).write()
    write_report(paths, is_live=False)
    names = [value for name, value in Elements(paths.report.read_text()).attributes if name == "class"]
    assert names.count("wide") == names.count("narrow") == 4


def test_a_template_escapes_text_and_attributes_and_misses_nothing(tmp_path):
    (tmp_path / "t.html.j2").write_text('<p title="{{ title }}">{{ text }}</p>')
    page = render_page(tmp_path / "t.html.j2", title="\"'", text="<b>&\ud800\u202e")
    assert page.decode() == '<p title="&#34;&#39;">&lt;b&gt;&amp;\\ud800\\u202e</p>'
    with pytest.raises(UndefinedError):
        render_page(tmp_path / "t.html.j2", title="")


def test_a_shape_escapes_its_attributes_and_its_title(tmp_path):
    (tmp_path / "t.html.j2").write_text('{% from "macros.html.j2" import chart %}{{ chart(drawn) }}')

    def draw(size):
        plot = Plot(size, x=(0.0, 1.0), lanes=[f"{BAD}, a name too long for its place"])
        plot.line([(0.0, 0.5), (0.5, math.nan), (1.0, 2.0)], BAD, title=BAD)
        return plot

    page = render_page(tmp_path / "t.html.j2", drawn=chart(draw, label=BAD, legend=[(BAD, BAD)], sizes=[WIDE])).decode()
    elements = Elements(page)
    assert set(elements.found) <= OURS
    assert not [name for name, _ in elements.attributes if name.startswith("on") or name == "src"]
    assert 'd="M50.0,146.0M1026.0,26.0"' in page  # broken where there is no number, and at the edge beyond it


@pytest.mark.slow
def test_a_long_run_stays_one_small_page(paths):
    LongRun(paths, steps=3000, incidents=40, attempts=2).write()
    told = write_report(paths, is_live=False)
    assert (len(told.steps), len(told.incidents), told.audit.problems) == (3000, 40, ())
    assert paths.report.stat().st_size < 600_000


# ── damage ──


def test_a_run_that_has_written_nothing_has_a_report(paths):
    write_report(paths, is_live=True)
    assert "No step was committed yet" in paths.report.read_text()


def test_torn_and_foreign_lines_are_passed_over(paths):
    LongRun(paths, steps=50, incidents=2).write()
    whole = write_report(paths, is_live=False)
    for path in (paths.metrics, paths.ledger, paths.events, paths.memory):
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
    data = started()
    step(data, 0, 10)
    data.take_step(line)
    data.take_ledger(line)
    data.take_memory({"time": line["time"], "in_use": {"host memory": ["NaN", 0]}})
    data.take_event({"event": "incident.began", "incident": 1} | line)
    data.take_event({"event": "trainer.restored", "time": 0, "global_step": -1})
    content = report_page(facts(data), written_at=T0, is_live=True).decode()
    assert "nan" not in re.sub(r"<style>.*?</style>", "", content, flags=re.DOTALL).lower()


def test_one_absurd_reward_does_not_hide_the_others():
    low, high = value_span([0.5 + 0.001 * k for k in range(200)] + [1e36])
    assert -1 < low < 0.5
    assert 0.7 < high < 2
    points = [(float(k), 0.5) for k in range(50)]
    points[10] = (10.0, 1e36)
    assert running_mean(points, 10, 50)[-1] == (49.0, 0.5)


def test_stretches_and_ticks():
    stretches = downsample([(float(k), float(k)) for k in range(10)], 4)
    assert [(s.first, s.last, s.mean, s.low, s.high, s.count) for s in stretches][-1] == (9, 9, 9, 9, 9, 1)
    assert len(stretches) == 4
    assert math.isnan(downsample([(0.0, math.nan)], 4)[0].mean)
    assert ticks(0, 1, most=5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 3, most=5) == [3]
    assert [label for _, label in time_ticks(90, most=5)] == [
        "0:00",
        "0:30",
        "1:00",
        "1:30",
    ]
    assert [clock_text(s) for s in (59, 3600, 200_000)] == ["0:59", "1:00 h", "2 d 7 h"]
