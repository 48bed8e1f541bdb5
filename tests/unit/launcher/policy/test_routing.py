"""The route of one request: the least loaded server, the one with the warm prefix where that costs little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.policy.routing import WARM_IS_WORTH, RoutingCandidate, may_take, route, trained_at


def one(index, samples, **more):
    return RoutingCandidate(name=f"server-{index}", index=index, samples=samples, **more)


@pytest.mark.parametrize(
    ("candidates", "samples", "taken"),
    [
        ([], 8, None),
        ([one(0, 8), one(1, 0)], 8, "server-1"),
        ([one(0, 8), one(1, 8)], 8, "server-0"),
        ([one(1, 4), one(0, 4)], 8, "server-0"),
        # warm: up to one request of the same size beyond the least loaded
        ([one(0, 0), one(1, 8, is_warm=True)], 8, "server-1"),
        ([one(0, 0), one(1, 9, is_warm=True)], 8, "server-0"),
        ([one(0, 0), one(1, 2, is_warm=True)], 1, "server-0"),
        ([one(0, 0), one(1, 1, is_warm=True)], 1, "server-1"),
        # home of an earlier epoch: among equals only
        ([one(0, 0), one(1, 0, is_home=True)], 8, "server-1"),
        ([one(0, 0), one(1, 1, is_home=True)], 8, "server-0"),
        # the one that has just failed at it: only where there is no other
        ([one(0, 0, is_avoided=True), one(1, 99)], 8, "server-1"),
        ([one(0, 0, is_avoided=True, is_warm=True), one(1, 0)], 8, "server-1"),
        ([one(0, 5, is_avoided=True)], 8, "server-0"),
    ],
)
def test_table(candidates, samples, taken):
    found = route(candidates, samples=samples)
    assert (None if found is None else found.name) == taken
    assert found is None or found.reason


def test_the_reason_says_what_decided():
    reasons = [route([first, one(1, 5)], samples=1).reason for first in (one(0, 0), one(0, 0, is_home=True))]
    assert reasons == ["least loaded", "it had the prompt before, and is as free"]
    assert route([one(0, 0, is_warm=True)], samples=1).reason == "its cache holds the prefix"


@pytest.mark.parametrize(
    ("in_flight", "more", "room"),
    [
        (0, {"ahead": 0}, 4),
        (0, {"ahead": 2}, 12),
        (5, {"ahead": 2}, 7),
        (5, {"ahead": 0}, 0),
        (6, {"ahead": 0, "flat": 3, "most_batches": 2}, 1),  # three of those in flight are replaced
        (8, {"ahead": 0, "flat": 8, "most_batches": 2}, 0),  # and no more than two batches are used up
    ],
)
def test_how_many_prompts_may_be_taken(in_flight, more, room):
    assert may_take(in_flight, batch=4, **more) == room


def test_a_prompt_is_trained_on_with_the_batch_of_its_place():
    assert [trained_at(place, version=3, batch=4) for place in (0, 3, 4, 9)] == [3, 3, 4, 5]


some_candidates = st.lists(
    st.builds(
        lambda samples, warm, home, avoided: {
            "samples": samples,
            "is_warm": warm,
            "is_home": home or warm,
            "is_avoided": avoided,
        },
        st.integers(0, 200),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
).map(lambda facts: [one(index, fact.pop("samples"), **fact) for index, fact in enumerate(facts)])


@given(some_candidates, st.integers(1, 16))
def test_nobody_is_taken_who_is_much_more_loaded_and_nobody_avoided_while_there_is_another(candidates, samples):
    found = route(candidates, samples=samples)
    taken = next(c for c in candidates if c.name == found.name)
    willing = [c for c in candidates if not c.is_avoided] or candidates
    assert taken in willing
    assert taken.samples <= min(c.samples for c in willing) + (WARM_IS_WORTH * samples if taken.is_warm else 0)


@given(some_candidates, st.integers(1, 16), st.randoms())
def test_the_order_in_which_servers_are_listed_is_nothing(candidates, samples, shuffle):
    mixed = list(candidates)
    shuffle.shuffle(mixed)
    if sum(c.is_warm for c in candidates) <= 1:
        assert route(mixed, samples=samples) == route(candidates, samples=samples)


@given(st.integers(2, 4), st.lists(st.booleans(), max_size=60), st.integers(1, 8))
def test_a_server_that_comes_back_is_never_ahead_of_the_others_by_more_than_one_request(others, ends, samples):
    """A closed loop: the others are full when it comes; each end of a request begins another."""
    loads = {**dict.fromkeys(range(others), 4 * samples), others: 0}
    for is_of_newcomer in ends:
        busy = [n for n, load in loads.items() if load >= samples and (n == others) == is_of_newcomer]
        if busy:
            loads[busy[0]] -= samples
        taken = route([one(n, load) for n, load in loads.items()], samples=samples)
        loads[int(taken.name.rpartition("-")[2])] += samples
        assert loads[others] <= min(load for n, load in loads.items() if n != others) + samples
