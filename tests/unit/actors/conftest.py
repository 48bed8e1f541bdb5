"""Two stand-ins for SGLang, over HTTP."""

import pytest

from tests.programs import stand_in_server


@pytest.fixture
def servers():
    with (
        stand_in_server.running("--weight-version", "0") as one,
        stand_in_server.running("--weight-version", "0") as two,
    ):
        yield one, two
