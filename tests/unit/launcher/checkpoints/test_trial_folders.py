"""Where a trial lies, in three layouts; and which name is wrong where it doesn't, with what there is instead."""

import pytest

from launcher.base.errors import ConfigError, UsageError
from launcher.checkpoints.trial_folders import find_trial
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL, USER, make_areal, snapshot


def place(root, path):
    (root / path / "default" / "epoch0epochstep3globalstep3").mkdir(parents=True)


@pytest.fixture
def root(tmp_path):
    for path in ("ann/exp/t1", "ann/exp/t2", "ann/other/t1", "bob/exp/t9", "forked/t1"):
        place(tmp_path, f"checkpoints/{path}")
    return tmp_path


def refusal(root, user, experiment, trial):
    before = snapshot(root) if root.exists() else None
    with pytest.raises(UsageError) as caught:
        find_trial(root, user, experiment, trial)
    assert (snapshot(root) if root.exists() else None) == before, "looking creates nothing"
    return f"{caught.value.message} | {caught.value.hint}"


def test_found_where_it_is(root):
    trial = find_trial(root, "ann", "exp", "t2")
    assert trial.default == root / "checkpoints/ann/exp/t2/default"
    assert (trial.name, trial.is_ours, trial.recover_info) == ("exp/t2", False, None)


def test_the_layout_without_the_user(root):
    trial = find_trial(root, "ann", "forked", "t1")
    assert trial.root == root / "checkpoints/forked/t1"
    assert not trial.is_ours


@pytest.mark.parametrize("layout", ["user", "plain", "recover"])
def test_areal_s_recover_info_in_each_layout(tmp_path, layout):
    top, info = make_areal(tmp_path, [3], recover_step=4, layout=layout)
    trial = find_trial(tmp_path, USER, EXPERIMENT, TRIAL)
    assert (trial.root, trial.recover_info) == (top, info)


def test_what_is_directly_in_the_recover_folder_counts_too(tmp_path):
    _, info = make_areal(tmp_path, [3], recover_step=4, layout="recover")
    for file in info.iterdir():
        file.rename(info.parent / file.name)
    assert find_trial(tmp_path, USER, EXPERIMENT, TRIAL).recover_info == info.parent


def test_each_wrong_name_is_named_with_what_there_is(root):
    said = refusal(root / "no" / "where", "ann", "exp", "t1")
    assert f"there is no folder {root}/no/where; {root} holds checkpoints" in said
    assert "--fileroot" in said
    said = refusal(root / "checkpoints", "ann", "exp", "t1")
    assert "has no folder checkpoints; it holds ann, bob, forked" in said
    said = refusal(root, "anne", "exp", "t9")
    assert "--user anne" in said
    assert "which holds ann" in said
    assert "it is there as bob/exp/t9" in said
    said = refusal(root, "ann", "expp", "t1")
    assert "--experiment-name expp" in said
    assert "which holds exp, other" in said
    said = refusal(root, "ann", "exp", "t3")
    assert "--trial-name t3" in said
    assert "which holds t2, t1" in said


def test_a_run_that_has_saved_nothing_yet_is_there_too(tmp_path):
    """Where the name of a trial beside it was wrong, its experiment was said not to be there."""
    (tmp_path / "checkpoints/ann/new/t1/default").mkdir(parents=True)
    place(tmp_path, "checkpoints/ann/exp/t1")
    said = refusal(tmp_path, "ann", "new", "t2")
    assert "--trial-name t2: there is no such folder" in said
    assert "which holds t1" in said
    assert find_trial(tmp_path, "ann", "new", None).name == "new/t1"
    assert find_trial(tmp_path, "ann", None, None).name == "exp/t1", "it alone has something to be seen"


def test_a_name_not_given_lists_what_there_is(root):
    assert "--experiment-name is not given | in " in refusal(root, "ann", None, "t1")
    assert find_trial(root, "ann", None, "t2").name == find_trial(root, "ann", "exp", "t2").name == "exp/t2"
    said = refusal(root, "ann", "exp", None)
    assert "--trial-name is not given" in said
    for name in ("exp/t1", "exp/t2", "other/t1", "bob/exp/t9", "forked/t1"):
        *user, experiment, trial = name.split("/")
        flags = f"{'--user bob ' if user else ''}--experiment-name {experiment} --trial-name {trial}"
        assert f" {flags}" in said


@pytest.mark.parametrize(("user", "experiment"), [("ann", None), ("ann", "exp"), ("bob", None)])
def test_the_only_trial_needs_no_name(tmp_path, user, experiment):
    """check_health and diagnose took the only run; list_checkpoints asked for names that it had just read."""
    place(tmp_path, "checkpoints/ann/exp/t1")
    place(tmp_path, "checkpoints/bob/forked/t2")
    expected = "exp/t1" if user == "ann" else "forked/t2"
    assert find_trial(tmp_path, user, experiment, None).name == expected


def test_one_that_lies_in_both_layouts_is_one(tmp_path):
    place(tmp_path, "checkpoints/ann/exp/t1")
    place(tmp_path, "checkpoints/exp/t1")
    assert find_trial(tmp_path, "ann", None, None).root == tmp_path / "checkpoints/ann/exp/t1"


def test_nothing_at_all_and_far_too_many(tmp_path):
    assert "it holds nothing" in refusal(tmp_path, "ann", "exp", "t1")
    for number in range(40):
        place(tmp_path, f"checkpoints/ann/exp/t{number}")
    assert "and 28 more" in refusal(tmp_path, "ann", "exp", "zzz")


def test_a_name_that_leads_out_is_refused(root):
    with pytest.raises(ConfigError, match="can't name a folder"):
        find_trial(root, "..", "exp", "t1")
