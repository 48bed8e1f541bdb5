"""P8: whoever of the server's owners is SIGKILLed, nothing of the server is left, and its port is free."""

import pytest

from tests.server_driver import STAND_IN, Driven


@pytest.mark.parametrize("victim", ["actor", "raylet", "driver"])
def test_nothing_outlives_its_owner(tmp_path, victim):
    with Driven(tmp_path, model_path="some/model", entry=STAND_IN) as driven:
        assert driven.kill(victim) == []
        assert driven.port_is_free()
