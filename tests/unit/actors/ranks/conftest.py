"""A second rank, which is a real process, and the model's folder of both."""

import pytest

from tests.support.rank_pair import Second
from tests.support.tiny_models import make_model


@pytest.fixture(scope="module")
def second():
    process = Second()
    yield process
    process.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("policy") / "model")
