"""The comparison with other trainers sees a difference, and refuses folders without them."""

import pytest
import torch

from scripts.lab.compare_losses import TOLERANCE, Case, _apart, main, make_case, ours


@pytest.mark.parametrize("other", [{"eps_clip": 0.1}, {"loss_aggregation": "sequence_mean"}, {"c_clip": 1.1}])
def test_another_recipe_differs(other):
    cases = [make_case(seed) for seed in range(5)]
    pairs = [(ours(case), ours(case, **other)) for case in cases]
    assert max(_apart(left[1], right[1], 1e-3) for left, right in pairs) > 100 * TOLERANCE


def test_the_loss_of_a_case_is_the_plain_one():
    case = make_case(3)
    case = Case(**{**vars(case), "kept": torch.ones_like(case.kept)})
    ratio = (case.logprobs - case.old).exp()
    advantages = case.advantages.repeat_interleave(case.lengths)
    plain = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).mean()
    assert ours(case)[0].item() == pytest.approx(plain.item(), abs=TOLERANCE)


def test_a_folder_without_the_package_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--verl", str(tmp_path)])
    assert ended.value.code == 2
    assert "there is no folder verl in it" in capsys.readouterr().err
