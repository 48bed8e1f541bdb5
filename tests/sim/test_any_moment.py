"""Whoever is killed, and at whatever moment of a run: it comes to the same end, and nothing is lost, doubled or stale.

A run is led to its end once without a death, which counts the moments. Then it is led once for each of them.
"""

from collections import Counter

import pytest

from tests.sim.scenarios import SCENARIOS
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
QUICK = ("trainer_and_server_at_once",)
SLOW = ("nothing", "all_servers_are_killed", "the_judge_breaks", "the_policy_collapses")
"""Scenarios of each tier; --long has all."""
LOOKED_AT = {"quick": 2, "slow": 4, "slow and long": 2}
"""Moments of a kind that each tier looks at, spread over the run; --long looks at all."""


def tier_of(row):
    return [] if row.name in QUICK else [pytest.mark.slow if row.name in SLOW else pytest.mark.long]


ROWS = [pytest.param(row, marks=tier_of(row), id=row.name) for row in SCENARIOS]


@pytest.fixture(scope="module")
def alone():
    """By scenario: the run without a death."""
    return {}


def spent(run):
    """Of the budgets of repair."""
    return Counter((one.cause, one.subject, one.rung) for one in run.coordinator.history.attempts)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("kind", "moment"), MOMENTS, ids=lambda one: one.replace(" ", "-"))
def test_whenever_one_is_killed_nothing_is_lost(simulator, tmp_path, request, alone, row, kind, moment):
    options = {"epochs": row.epochs, "mortal_from": row.falls_at}
    if row.name not in alone:
        alone[row.name] = simulator.live(tmp_path / "alone", row.befalls, **options)
    undisturbed = alone[row.name]
    assert findings_of(undisturbed, row.ends) == ()
    moments = undisturbed.death.seen[kind, moment]
    assert moments > 3
    tier = "slow and long" if row.is_long else "slow" if request.config.getoption("all") else "quick"
    looked_at = moments if request.config.getoption("long") else LOOKED_AT[tier]
    step = -(-moments // looked_at)
    for number in range(1, moments + 1, step):
        death = Death((kind, moment), number)
        run = simulator.live(tmp_path / str(number), row.befalls, death=death, **options)
        assert death.has_come
        where = f"{kind} killed {moment}, the {number}th"
        assert findings_of(run, row.ends) == (), where
        if kind == "coordinator":
            extra = spent(run) - spent(undisturbed)
            assert all(times == 1 for times in extra.values()), (
                f"{where}: an order that was not carried out may count, once: {extra}"
            )
