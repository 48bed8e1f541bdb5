"""The report of a run: its figures are those of the files, nothing in them can break out of the page, and a damaged
file, a full disk or a run that was killed keep nobody from it."""

import json
import math
import re
import time
from html.parser import HTMLParser

import pytest

from launcher.config import RunConfig
from launcher.journal import Journal, append_line
from launcher.messages import Outcome, RunWord
from launcher.report import writer
from launcher.report.facts import facts_of
from launcher.report.markup import join, tag, text
from launcher.report.page import page
from launcher.report.plot import clock_text, span_of, ticks, time_ticks
from launcher.report.story import MOST_MEMORY, Story, StoryReader
from launcher.report.thin import running_mean, thin
from launcher.report.writer import ReportWriter, write_report
from launcher.run_paths import RunPaths
from launcher.screen import Screen
from tests.long_run import LongRun

BAD = """'"><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\u202e\x00"""
T0 = 1_790_000_000.0


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    return paths


def event(story, name, now, /, **facts):
    story.take_event({"time": T0 + now, "monotonic": now, "event": name, "attempt": 1} | facts)


def step(story, number, at, *, reward=0.5, took=10.0, attempt=1):
    story.take_step(
        {"global_step": number, "attempt": attempt, "time": T0 + at, "rollout/reward": reward}
        | {"timeperf/step_s": took, "rollout/tokens_per_s": 100.0}
    )
    ledger = {"global_step": number, "prompt_ids": [f"p{number}"], "weight_versions": [number]}
    story.take_ledger(ledger | {"rollouts_failed": 1, "rollouts_retried": 2})


def facts(story, **more):
    return facts_of(story, experiment_name="exp", trial_name="t0", **more)


def started(story):
    event(story, "run.started", 0, reason="fresh")
    event(story, "trainer.started", 5, prompts=1000, total_steps=100)


# ── figures ──


def test_an_incident_is_timed_from_its_own_beginning():
    story = Story()
    started(story)
    step(story, 0, 20)
    event(story, "server.died", 23.2, incident=1, subject="server-0", detected_after_s=0.2)
    event(
        story, "incident.began", 23.5, incident=1, cause="server_crash", subject="server-0", at=23.2, reason="SIGKILL"
    )
    step(story, 1, 30)
    event(story, "incident.ended", 33.2, incident=1, cause="server_crash", is_mended=True, actions=["restarted"])
    (one,) = facts(story).incidents
    assert one.detected_s == pytest.approx(0.3)  # the observer's beginning is earlier than 23.5 - 0.2
    assert one.repaired_s == pytest.approx(10.0)
    assert one.next_step_s == pytest.approx(6.8)
    assert (one.step, one.is_mended, one.steps_back) == (1, True, 0)


def test_a_collapse_is_timed_from_its_first_bad_step_and_to_the_first_one_after_it_was_told():
    story = Story()
    started(story)
    for number in range(10):
        step(story, number, 20 + 10 * number, reward=0.0 if number >= 7 else 0.8)
    event(story, "incident.began", 111, incident=1, cause="reward_collapse", subject="policy", onset_step=7, at=111.0)
    event(story, "trainer.restored", 112, global_step=4, incident=1, reason="from step 4")
    step(story, 5, 130)
    event(story, "incident.ended", 131, incident=1, cause="reward_collapse", is_mended=True)
    told = facts(story)
    (one,) = told.incidents
    assert (one.detected_s, one.next_step_s, one.steps_back) == (21.0, 40.0, 5)
    assert [line.step for line in told.steps] == [0, 1, 2, 3, 4, 5]
    assert [[line.step for line in segment] for segment in told.taken_back] == [[5, 6, 7, 8, 9]]
    assert told.losses.bad_steps == 0  # all of them were taken back


def test_ettr_is_the_share_of_the_time_that_became_steps_that_stand():
    story = Story()
    started(story)
    for number in range(4):
        step(story, number, 20 + 10 * number)
    event(story, "incident.began", 55, incident=1, cause="server_hang", subject="server-0", at=55.0)
    step(story, 4, 90, took=40.0)
    event(story, "incident.ended", 80, incident=1, cause="server_hang", is_mended=True)
    event(story, "run.finished", 100, reason="done")
    losses = facts(story).losses
    assert losses.wall_s == 100.0
    assert losses.ettr == pytest.approx(0.8)
    assert losses.strict == pytest.approx(0.5)  # the step that waited counts as a usual one
    assert losses.semantic == pytest.approx(0.8)
    assert losses.lost_steps_per_incident == pytest.approx(5.0)


def test_bad_steps_that_still_stand_are_lost_to_the_semantic_measure():
    story = Story()
    started(story)
    for number in range(5):
        step(story, number, 20 + 10 * number)
    event(story, "incident.began", 61, incident=1, cause="verifier_broken", subject="reward", onset_step=3, at=61.0)
    event(story, "run.errored", 100, reason="the reward function is broken")
    told = facts(story)
    assert (told.losses.bad_steps, told.word) == (2, "ERRORED")
    assert told.losses.semantic == pytest.approx(0.3)
    event(story, "incident.began", 99, incident=2, cause="reward_collapse", subject="policy", at=99.0)
    assert facts(story).losses.semantic is None  # nobody knows where that one began


def test_a_restore_takes_steps_back_before_the_first_is_repeated():
    story = Story()
    started(story)
    for number in range(6):
        step(story, number, 20 + number)
    event(story, "trainer.restored", 40, global_step=3, reason="from step 3")
    event(story, "trainer.restored", 41, global_step=1, reason="from step 1")
    told = facts(story)
    assert [line.step for line in told.steps] == [0, 1]
    assert [one.steps_back for one in told.restores] == [2, 2]


def test_attempts_are_laid_end_to_end():
    story = Story()
    started(story)
    step(story, 0, 50)
    story.take_event({"time": T0 + 10_000, "event": "run.started", "attempt": 2, "reason": "resumed"})
    step(story, 1, 10_060, attempt=2)
    told = facts(story)
    assert told.clock.total_s == 110.0
    assert told.clock.idle_s == 9950.0
    assert [told.clock.at(T0 + at) for at in (25, 5000, 10_030)] == [25.0, 50.0, 80.0]
    assert told.word == ""


def test_the_ledgers_violations_are_told():
    story = Story()
    started(story)
    for number in (0, 1, 3):
        step(story, number, 20 + number)
    event(story, "run.finished", 60, reason="done")
    content = page(facts(story), written_at=T0, is_live=False).decode()
    assert "violations" in content
    assert "steps never committed: [2]" in content


def test_the_step_that_is_being_written_down_is_no_violation():
    story = Story()
    started(story)
    step(story, 0, 20)
    story.take_ledger({"global_step": 1, "prompt_ids": ["p1"], "weight_versions": [1]})
    assert facts(story).audit.problems == ()
    event(story, "run.errored", 60, reason="full disk")
    assert facts(story).audit.problems == ("steps without metrics: [1]",)


def test_what_became_of_checkpoints_is_told():
    story = Story()
    started(story)
    for number in (4, 9, 14):
        event(story, "checkpoint.committed", number, global_step=number, seconds=0.1)
    event(story, "checkpoint.pruned", 15, subject="epoch0epochstep4globalstep4", global_step=4)
    event(story, "checkpoint.condemned", 16, checkpoints=["epoch0epochstep14globalstep14.condemned-1"])
    assert {one.step: one.fate for one in facts(story).checkpoints} == {4: "made room", 9: "", 14: "condemned"}


def test_no_peak_of_memory_is_lost_over_a_long_run():
    story = Story()
    for at in range(5 * MOST_MEMORY):
        used = 90.0 if at == 1234 else 10.0
        story.take_memory({"time": T0 + at, "in_use": {"host memory": [used, 100.0]}})
    assert len(story.memory) <= MOST_MEMORY
    assert max(reading.in_use["host memory"][0] for reading in story.memory) == 90.0


# ── the page ──


class Elements(HTMLParser):
    """Every element and attribute that a browser would find."""

    def __init__(self, content):
        super().__init__()
        self.found, self.attributes, self.shown, self._raw = [], [], "", False
        self.feed(content)

    def handle_starttag(self, name, attributes):
        self.found.append(name)
        self.attributes += attributes
        self._raw = name in ("script", "style")

    def handle_endtag(self, name):
        self._raw = False

    def handle_data(self, data):
        self.shown += "" if self._raw else data


OURS = frozenset(
    {
        *("html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer", "div", "span", "p"),
        *("b", "a", "h1", "h2", "ul", "li", "i", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td"),
        *("details", "summary", "code", "script", "svg", "g", "line", "path", "rect", "circle", "polygon", "text"),
    }
)


def malicious_story():
    story = Story()
    started(story)
    for number in range(40):
        step(story, number, 20 + number)
    event(story, "incident.began", 50, incident=1, cause=BAD, subject=BAD, reason=BAD, doing=BAD, onset_step=3)
    event(story, "incident.ended", 55, incident=1, is_mended=False, reason=BAD, actions=[BAD])
    event(story, "incident.began", 56, incident=2, cause="server_crash", subject=BAD, reason=BAD)
    event(story, "trainer.restored", 57, global_step=30, reason=BAD)
    event(story, "run.running", 58, state=BAD, reason=BAD)
    event(story, "run.paused", 58, state="PAUSED", reason=BAD)
    event(story, "checkpoint.committed", 59, global_step=30, subject=BAD, seconds=BAD)
    for at in (10, 20, 30):
        story.take_memory({"time": T0 + at, "in_use": {BAD: [1e9, 2e9]}})
    story.take_ledger({"global_step": 7, "prompt_ids": [BAD, BAD], "weight_versions": [BAD]})
    event(story, "run.errored", 90, reason=BAD)
    return story


def test_nothing_that_a_log_says_can_break_out_of_the_page():
    told = facts_of(malicious_story(), experiment_name=BAD, trial_name=BAD)
    content = page(told, written_at=T0, is_live=None).decode()
    elements = Elements(content)
    assert elements.found.count("script") == 1
    assert set(elements.found) <= OURS
    assert not [name for name, _ in elements.attributes if name.startswith("on") or name == "src"]
    assert "alert(1)" in elements.shown  # it is shown, as the text that it is
    assert "\x00" not in content
    assert "\u202e" not in content


def test_links_lead_to_the_runs_own_files_alone():
    told = facts_of(malicious_story(), experiment_name="e", trial_name="t", folders=frozenset({1, 2}))
    links = [
        value for name, value in Elements(page(told, written_at=T0, is_live=True).decode()).attributes if name == "href"
    ]
    assert "incidents/1/" in links
    assert all(re.fullmatch(r"[\w.]+/?|incidents/\d+/", link) for link in links)


def test_the_page_asks_for_nothing_from_outside(paths):
    LongRun(paths, steps=60, incidents=3).write()
    write_report(paths, is_live=False)
    content = paths.report.read_text()
    assert "://" not in content
    assert "default-src &#x27;none&#x27;" in content
    assert not re.search(r"@import|url\(|<link|<iframe|<img", content)


def test_each_picture_has_its_wide_and_its_narrow_form(paths):
    LongRun(paths, steps=60, incidents=3).write()
    write_report(paths, is_live=False)
    names = [value for name, value in Elements(paths.report.read_text()).attributes if name == "class"]
    assert names.count("wide") == names.count("narrow") == 4


def test_markup_escapes_all_but_itself():
    assert tag("p", "<b>", tag("b", "&"), title='"') == '<p title="&quot;">&lt;b&gt;<b>&amp;</b></p>'
    assert join(1, None) == "1None"
    assert text("\ud800") == "\ufffd"
    assert tag("rect", x=1.25, y=2.0, rx=None, hidden=False) == '<rect x="1.2" y="2"></rect>'


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
    story = Story()
    started(story)
    step(story, 0, 10)
    story.take_step(line)
    story.take_ledger(line)
    story.take_memory({"time": line["time"], "in_use": {"host memory": ["NaN", 0]}})
    story.take_event({"event": "incident.began", "incident": 1} | line)
    story.take_event({"event": "trainer.restored", "time": 0, "global_step": -1})
    content = page(facts(story), written_at=T0, is_live=True).decode()
    assert "nan" not in re.sub(r"<style>.*?</style>", "", content, flags=re.DOTALL).lower()


def test_one_absurd_reward_does_not_hide_the_others():
    low, high = span_of([0.5 + 0.001 * k for k in range(200)] + [1e36])
    assert -1 < low < 0.5
    assert 0.7 < high < 2
    points = [(float(k), 0.5) for k in range(50)]
    points[10] = (10.0, 1e36)
    assert running_mean(points, 10, 50)[-1] == (49.0, 0.5)


def test_stretches_and_ticks():
    stretches = thin([(float(k), float(k)) for k in range(10)], 4)
    assert [(s.first, s.last, s.mean, s.low, s.high, s.count) for s in stretches][-1] == (9, 9, 9, 9, 9, 1)
    assert len(stretches) == 4
    assert math.isnan(thin([(0.0, math.nan)], 4)[0].mean)
    assert ticks(0, 1, most=5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 3, most=5) == [3]
    assert [label for _, label in time_ticks(90, type("S", (), {"ticks_across": 5}))] == [
        "0:00",
        "0:30",
        "1:00",
        "1:30",
    ]
    assert [clock_text(s) for s in (59, 3600, 200_000)] == ["0:59", "1:00 h", "2 d 7 h"]


# ── the writer ──


def wait_until(holds, what):
    give_up_at = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.01)


def test_the_report_follows_the_run_and_ends_with_its_word(paths):
    journal = Journal(paths.events, 1)
    journal.record("run.started", reason="fresh")
    following = ReportWriter(paths, period_s=0.02)
    journal.record("run.running", state="RUNNING", reason="first of all")
    wait_until(lambda: paths.report.exists() and "first of all" in paths.report.read_text(), "the state in the report")
    append_line(paths.metrics, {"global_step": 0, "attempt": 1, "time": time.time(), "rollout/reward": 0.25})
    wait_until(lambda: "reward 0.250" in paths.report.read_text(), "the step in the report")
    assert 'data-live="yes"' in paths.report.read_text()
    journal.record("run.finished", reason="all is done")
    following.close()
    content = paths.report.read_text()
    assert "FINISHED" in content
    assert 'data-live="no"' in content
    assert not [path for path in paths.logs.iterdir() if path.name.startswith(".report")]
    following.close()  # once is enough, twice does no harm


def test_a_report_that_can_not_be_written_costs_the_run_nothing(paths, caplog):
    Journal(paths.events, 1).record("run.started", reason="fresh")
    paths.report.mkdir()  # a folder in its place refuses every rename
    following = ReportWriter(paths, period_s=0.01)
    wait_until(lambda: "was not written" in caplog.text, "the warning")
    following.close()
    assert not following._thread.is_alive()


def test_a_defect_of_the_report_costs_the_run_nothing(paths, monkeypatch, caplog):
    monkeypatch.setattr(writer, "page", lambda *_, **__: 1 / 0)
    Journal(paths.events, 1).record("run.started", reason="fresh")
    following = ReportWriter(paths, period_s=0.01)
    wait_until(lambda: "could not be made" in caplog.text, "the log line")
    following.close()


def test_a_page_that_takes_long_is_made_seldom(paths, monkeypatch):
    """Its share of the time is 1 / PAUSE_FACTOR at most, whatever it costs."""
    clock, pauses = [0.0], []

    class Ended:
        def wait(self, pause_s):
            pauses.append(pause_s)
            return len(pauses) > 3

        def is_set(self):
            return True

        def set(self):
            pass

    following = object.__new__(ReportWriter)
    following._period_s, following._ended = 10.0, Ended()
    monkeypatch.setattr(writer.time, "monotonic", lambda: clock[0])
    costs = iter([0.01, 0.5, 2.0])
    following._turn = lambda *, is_live: clock.__setitem__(0, clock[0] + next(costs))
    following._follow()
    assert pauses == pytest.approx([10.0, 10.0, 50.0, 200.0])


def small_run(tmp_path):
    config = RunConfig(experiment_name="exp")
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    return config, paths


@pytest.mark.parametrize("word", list(RunWord))
def test_whatever_a_runs_word_is_its_last_report_has_it_and_the_console_says_where(tmp_path, capsys, word):
    config, paths = small_run(tmp_path)
    with Screen(config, paths) as screen:
        screen.begin(1)
        journal = Journal(paths.events, 1)
        journal.record("run.started", reason="fresh")
        journal.record(f"run.{word.lower()}", reason="so it is")
        screen.close(Outcome(word=word, reason="so it is"))
    assert (
        f'<span class="word {"good" if word is RunWord.FINISHED else "bad"}">{word}</span>' in paths.report.read_text()
    )
    assert f"report      {paths.report}" in capsys.readouterr().out


def test_a_driver_that_breaks_leaves_a_report_too(tmp_path):
    config, paths = small_run(tmp_path)
    with pytest.raises(ZeroDivisionError), Screen(config, paths) as screen:
        screen.begin(1)
        Journal(paths.events, 1).record("run.started", reason="fresh")
        1 / 0  # noqa: B018
    assert "ENDED WITHOUT A WORD" in paths.report.read_text()


def test_new_lines_alone_are_read_again(paths):
    reader = StoryReader(paths)
    assert reader.refresh() == 0
    append_line(paths.metrics, {"global_step": 0})
    assert (reader.refresh(), reader.refresh()) == (1, 0)
    with paths.metrics.open("a") as file:
        file.write(json.dumps({"global_step": 1}))
    assert reader.refresh() == 0  # it is still being written
    assert reader.refresh(has_ended=True) == 1
