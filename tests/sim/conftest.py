import pytest

from tests.sim.simulated_run import Simulator


@pytest.fixture
def simulator(monkeypatch):
    return Simulator(monkeypatch)
