"""Whatever stands in the lines of a run's files, the report is made, in the time and the room of any other."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.html_report.page import render_page
from launcher.html_report.page_facts import page_facts
from launcher.reporting.run_reader import RunData
from tests.support.report_parts import T0, facts, facts_in

NAMES = (
    *("run.started", "run.running", "run.finished", "incident.began", "incident.ended", "incident.joined"),
    *("trainer.restored", "trainer.started", "checkpoint.committed", "checkpoint.pruned", "checkpoint.condemned"),
    *("eval.done", "server.died", "batch.rejected"),
)
KEYS = (
    *("time", "monotonic", "at", "attempt", "subject", "reason", "global_step", "incident", "cause", "onset_step"),
    *("is_mended", "seconds", "actions", "state", "prompts", "total_steps", "policy_version", "sampled", "greedy"),
    *("checkpoints", "detected_after_s", "doing", "rollout/reward", "rollout/tokens_per_s", "timeperf/step_s"),
    *("prompt_ids", "weight_versions", "rollouts_failed", "in_use"),
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 30),
    st.just(10**9),
    st.floats(),
    st.floats(T0, T0 + 1000),
    st.sampled_from(["NaN", "-Infinity", "RUNNING", "server_crash", "reward_collapse", "globalstep5"]),
    st.text(string.printable, max_size=8),
)
ANYTHING = st.one_of(PLAIN, st.lists(PLAIN, max_size=3), st.dictionaries(st.text(max_size=3), PLAIN, max_size=2))
LINE = st.tuples(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=12))
SOUND = st.fixed_dictionaries({"time": st.floats(T0, T0 + 1000), "attempt": st.integers(1, 2)})


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(LINE, st.one_of(SOUND, st.just({}))), max_size=25), st.sampled_from([True, False, None]))
def test_no_line_keeps_the_report_from_being_made(lines, is_live):
    data = RunData()
    for (name, damaged), sound in lines:
        line = damaged | sound
        data.take_event({"event": name} | line)
        for take in (data.take_step, data.take_ledger, data.take_memory):
            take(line)
    facts_in(render_page(page_facts(facts(data), is_live=is_live, at=T0)))
