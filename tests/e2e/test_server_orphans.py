"""P8 with the real SGLang: whoever of its owners is SIGKILLed, nothing of it is left, and its port is free."""

from pathlib import Path

import pytest

from tests.programs.server_driver import Driven

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = Path(__file__).parents[2] / "assets" / "arithmetic" / "model"


# a killed driver while its server starts: tests/e2e/test_one_run.py
@pytest.mark.parametrize(
    "victims", [["actor", "raylet"], pytest.param(["driver"], marks=pytest.mark.long)], ids=" ".join
)
def test_nothing_outlives_its_owner(tmp_path, victims):
    """A server for each, with its host; that of the next victim lives on."""
    with Driven(tmp_path, model_path=str(MODEL), entry=None, servers=len(victims)) as driven:
        for index, victim in enumerate(victims):
            shared_memory = driven.shared_memory(index)
            assert shared_memory
            assert driven.is_forked(index)
            assert driven.kill(victim, index) == []
            assert not any(file.exists() for file in shared_memory)
            assert driven.port_is_free(index)
