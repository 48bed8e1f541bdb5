"""A scoring process that keeps what it makes is replaced before it takes the machine's memory. Real processes."""

import pytest

from actors.reward.reward_pool import RewardPool
from tests.support.worlds.reward import config, score

KEEPING = """
kept = []

def score(*, completion, **_):
    kept.append(b"x" * int(completion) * 10**6)
    return len(kept)
"""


@pytest.fixture
def keeps(tmp_path, monkeypatch):
    (tmp_path / "keeping.py").write_text(KEEPING)
    monkeypatch.syspath_prepend(tmp_path)
    return "keeping:score"


@pytest.mark.parametrize(("most", "values"), [(0.05, [1, 2, 3, 1]), (None, [1, 2, 3, 4])])
def test_a_process_that_has_grown_is_replaced_between_two_groups_and_no_answer_is_lost(keeps, caplog, most, values):
    with RewardPool(config(keeps, max_growth_gb=most)) as pool:
        found = [score(pool, [str(megabytes)])[0].value for megabytes in (80, 40, 20, 1)]
    assert found == values
    said = "reward.fn='keeping:score' has grown by 0.1 GB since its first completions"
    assert (said in caplog.text) == (most is not None)
