"""Whoever is killed, and at whatever moment of a run: it FINISHES, and nothing is lost, doubled or stale.

A run is led to its end once without a death, which counts the moments. Then it is led once for each of them.
"""

import pytest

from launcher.run_files.journal import read_lines
from tests.sim import scenarios
from tests.sim.simulated_run import findings_of
from tests.support.mortal import Death

MOMENTS = [
    ("coordinator", "before a save"),
    ("coordinator", "after a save"),
    ("coordinator", "after an action"),
    ("monitor", "before an answer"),
    ("monitor", "after an answer"),
    ("trainer", "a call"),
    ("trainer", "before the ledger's line"),
    ("trainer", "after the ledger's line"),
]
BEFALLS = [
    scenarios.trainer_and_server_at_once,
    *(
        pytest.param(one, marks=pytest.mark.slow)
        for one in (scenarios.nothing, scenarios.all_servers_are_killed, scenarios.the_judge_breaks)
    ),
]
QUICK, SLOW = 3, 20
"""Moments of a kind that each tier looks at, spread over the run; --long looks at all."""


@pytest.mark.parametrize("befalls", BEFALLS, ids=lambda one: one.__name__)
@pytest.mark.parametrize(("kind", "moment"), MOMENTS, ids=lambda one: one.replace(" ", "-"))
def test_whenever_one_is_killed_nothing_is_lost(simulator, tmp_path, request, befalls, kind, moment):
    alone = simulator.live(tmp_path / "alone", befalls)
    assert findings_of(alone) == ()
    moments = alone.death.seen[kind, moment]
    assert moments > 3
    looked_at = moments if request.config.getoption("long") else SLOW if request.config.getoption("all") else QUICK
    step = -(-moments // looked_at)
    for number in range(1, moments + 1, step):
        death = Death((kind, moment), number)
        run = simulator.live(tmp_path / str(number), befalls, death=death)
        assert death.has_come
        assert findings_of(run) == (), f"{kind} killed {moment}, the {number}th"
        lines = [*read_lines(run.paths.events)]
        began = [line["incident"] for line in lines if line["event"] == "incident.began"]
        ended = [line["incident"] for line in lines if line["event"] == "incident.ended"]
        assert sorted(began) == sorted(ended) == [*range(1, len(began) + 1)], (
            "each incident has one number, and its end"
        )
