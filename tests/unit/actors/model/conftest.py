"""Model folders of a few thousand random parameters."""

import pytest

from tests.support.tiny_models import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def ref_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("reference") / "model", seed=1)
