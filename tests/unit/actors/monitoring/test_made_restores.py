"""Made runs with one cause each, under the real monitor and recovery plan."""

from collections import Counter

import pytest

from tests.support.made_runs.restore_world import CAUSES
from tests.support.made_runs.restores import one

EACH = 20


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


@pytest.mark.long
@pytest.mark.parametrize("cause", CAUSES)
def test_of_many_runs_few_end_on_damaged_weights_or_lose_what_was_sound(cause):
    """What is missed is on the measurements page: of 200 runs of a cause at most 12 lost what was sound."""
    found = [one(cause, CAUSES[cause], seed) for seed in range(EACH)]
    named = Counter(outcome.named for outcome in found)
    thrown = sorted(outcome.thrown_away for outcome in found)
    print(f"{cause}: {dict(named)}, thrown away {thrown}, condemned {sum(o.condemned for o in found)}")
    assert sum(outcome.ends_contaminated for outcome in found) <= 2
    if CAUSES[cause].weights is None:
        assert sum(outcome.condemned > 0 or outcome.thrown_away > 0 for outcome in found) <= 4
