"""Made runs under the real monitor and plan: a few of those that the benchmark `restores` measures by the hundred."""

import pytest

from scripts.lab.benchmark.made_data.restore_world import CAUSES
from scripts.lab.benchmark.restores import one, points_of


@pytest.mark.parametrize(
    "cause",
    [
        "policy collapses at once",
        "reward function: 0 for half",
        "reward function: 0 for new completions only",
        "data: prompts twice as hard",
        "wrong chat template",
        "nothing",
    ],
)
def test_the_cause_is_named_and_only_a_collapse_goes_back(cause):
    found = one(cause, CAUSES[cause], seed=1)
    assert found.is_right, found
    assert not found.ends_contaminated
    assert found.condemned == 0
    is_collapse = CAUSES[cause].weights is not None
    assert bool(found.restored) or not is_collapse
    assert found.thrown_away == 0 or is_collapse
    assert points_of([found])["thrown_away_outside"] == ([] if is_collapse else [0.0])
