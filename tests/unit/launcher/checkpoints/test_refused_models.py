"""docs/recipes.md names each family that can be trained, and says of the others what the launcher says."""

import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from launcher.checkpoints.model_files import unsupported
from launcher.checkpoints.model_shape import MODEL_TYPES

PAGE = (Path(__file__).parents[4] / "docs" / "recipes.md").read_text()
TRAINED = re.findall(r"^\| `(\w+)` \| [A-Z]", PAGE, re.MULTILINE)
REFUSED = [
    (kind, said.replace("…", kind))
    for said, kinds in re.findall(r"^\| (a … model.*) \| ((?:`\w+` ?)+)\|$", PAGE, re.MULTILINE)
    for kind in re.findall(r"\w+", kinds)
]


def test_the_page_has_a_row_for_each_family_that_can_be_trained():
    assert sorted(TRAINED) == sorted(MODEL_TYPES)
    assert len(REFUSED) > 10


@pytest.mark.parametrize("kind", TRAINED)
def test_a_plain_model_of_a_family_is_taken(kind):
    assert unsupported(AutoConfig.for_model(kind).to_dict()) == ""


@pytest.mark.parametrize(("kind", "said"), REFUSED)
def test_any_other_is_refused_as_the_page_says(kind, said):
    assert unsupported(AutoConfig.for_model(kind).to_dict()) == said
