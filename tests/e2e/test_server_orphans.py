"""P8 with the real SGLang: whoever of its owners is SIGKILLed, nothing of it is left, and its port is free."""

from pathlib import Path

import pytest

from tests.server_driver import Driven

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = Path(__file__).parents[2] / "assets" / "arithmetic" / "model"


@pytest.mark.parametrize("victim", ["actor", "raylet", "driver"])
def test_nothing_outlives_its_owner(tmp_path, victim):
    with Driven(tmp_path, model_path=str(MODEL), entry=None) as driven:
        shared_memory = driven.shared_memory()
        assert shared_memory
        assert driven.kill(victim) == []
        assert not any(file.exists() for file in shared_memory)
        assert driven.port_is_free()
