"""A whole run without processes, under each scenario: what must come comes, what must not does not (scenarios.py)."""

import pytest

from launcher.run_files.journal import read_lines
from launcher.run_log.step_line import DISTANCE
from tests.sim import scenarios
from tests.sim.scenarios import SCENARIOS
from tests.sim.sim_servers import OTHER_WEIGHTS
from tests.sim.simulated_run import findings_of

ROWS = [pytest.param(row, marks=[pytest.mark.slow] if row.is_long else [], id=row.name) for row in SCENARIOS]


def missing_of(wanted, events):
    """The first of the `wanted` that does not come after those before it; None where all do."""
    coming = iter(events)
    return next((one for one in wanted if one not in coming), None)


@pytest.mark.parametrize("row", ROWS)
def test_what_befalls_a_run_ends_as_it_must(simulator, tmp_path, row):
    run = simulator.live(tmp_path / "run", row.befalls, epochs=row.epochs)
    assert findings_of(run, row.ends) == ()
    events = [line["event"] for line in run.events()]
    assert missing_of(row.shows, events) is None
    assert not {*events} & {*row.never}
    assert ("incident.began" in events) is not row.is_harmless, "what was meant to befall the run did"
    assert row.incidents in (None, events.count("incident.began"))


def test_weights_that_a_label_alone_vouches_for_make_no_step(simulator, tmp_path):
    run = simulator.live(tmp_path / "run", scenarios.a_server_says_that_it_has_the_weights)
    assert max(line[DISTANCE] for line in read_lines(run.paths.metrics)) < OTHER_WEIGHTS / 100
