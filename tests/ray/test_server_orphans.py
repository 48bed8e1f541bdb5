"""P8: whoever of a server's owners is SIGKILLed, nothing of the server is left, and its port is free."""

import pytest

from tests.programs.server_driver import STAND_IN, Driven


@pytest.mark.parametrize("victims", [["actor", "raylet"], ["driver"]], ids=" ".join)
def test_nothing_outlives_its_owner(tmp_path, victims):
    """A server for each; that of the next victim lives on."""
    with Driven(tmp_path, model_path="some/model", entry=STAND_IN, servers=len(victims)) as driven:
        for index, victim in enumerate(victims):
            assert driven.kill(victim, index) == []
            assert driven.port_is_free(index)
