"""The report has the curves of training that the watch page has, of the steps that were kept."""

import html

from launcher.html_report.report_writer import write_report
from launcher.html_report.training_charts import LARGE_ONES, training_charts
from launcher.reporting.figures import charts_of
from launcher.reporting.run_facts import read_facts
from launcher.run_files.journal import append_line
from tests.support.long_run import LongRun


def test_every_curve_of_the_watch_page_is_in_the_report(paths):
    LongRun(paths, steps=300, incidents=3).write()
    append_line(paths.metrics, {"global_step": 300, "time": 1.9e9, "attempt": 1, "own/<figure>": 1.5})
    facts = write_report(paths, is_live=False)
    text = paths.report.read_text()
    shown = [one["title"] for one in charts_of(facts.figures.keys) if one["title"] not in LARGE_ONES]
    kl = "KL of old and new policy in a step"
    assert {kl, "Entropy", "Gradient norm", "Learning rate", "Seconds of a step", "own/<figure>"} <= {*shown}
    captions = [html.unescape(part.partition("</")[0]) for part in text.split("<figcaption>")[1:]]
    assert [caption.partition(",")[0] for caption in captions] == [title.partition(",")[0] for title in shown]


def test_steps_that_a_restore_undid_are_in_no_curve(paths):
    for step, value in ((0, 1.0), (1, 99.0), (2, 99.0), (1, 2.0)):
        append_line(
            paths.metrics, {"global_step": step, "time": 1.8e9 + step, "attempt": 1, "grpo_actor/grad_norm": value}
        )
    (chart,), _ = training_charts(read_facts(paths))
    titles = [shape.title for shape in chart.plots[0].shapes if shape.title]
    assert titles == ["step 0: 1", "step 1: 2"]
