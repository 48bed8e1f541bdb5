"""When new weights leave the fast way for files, and when they come back."""

from actors.weights.weight_way import AGAIN_AFTER, AGAIN_AT_MOST, WeightWay


def fast():
    return WeightWay(by_files=False, may_change=True)


def publishes_by_files(way):
    n = 0
    while way.by_files:
        way.published()
        n += 1
    return n


def test_two_failures_in_a_row_of_one_server_take_files():
    way = fast()
    assert [way.failed("a"), way.failed("b")] == [False, False]
    assert not way.took("a")
    assert not way.failed("a"), "not in a row"
    assert not way.by_files
    assert way.failed("b")
    assert way.by_files
    assert way.n_failures == 4
    assert not way.failed("b"), "what was sent before says nothing of files"


def test_the_fast_way_is_tried_again_and_one_failure_then_doubles_the_wait():
    way = fast()
    way.failed("a"), way.failed("a")
    waits = []
    for _ in range(6):
        waits.append(publishes_by_files(way))
        assert way.failed("a"), "at once"
    assert waits == [AGAIN_AFTER * 2**n for n in range(5)] + [AGAIN_AT_MOST]


def test_once_it_works_again_it_is_said_once_and_all_is_as_before():
    way = fast()
    way.failed("a"), way.failed("a")
    publishes_by_files(way)
    assert [way.took("a"), way.took("b")] == [True, False]
    assert not way.failed("a")
    assert way.failed("a")
    assert publishes_by_files(way) == AGAIN_AFTER


def test_where_files_were_asked_for_nothing_changes():
    way = WeightWay(by_files=True, may_change=False)
    for _ in range(2 * AGAIN_AFTER):
        way.published()
    assert way.by_files
    assert not way.failed("a")


def test_a_late_answer_from_before_files_does_not_end_them():
    way = fast()
    way.failed("a"), way.failed("a")
    assert not way.took("b")
    assert way.by_files
