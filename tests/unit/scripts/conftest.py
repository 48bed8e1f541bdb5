"""A fake run with real processes, for the tests of the fault injector."""

import signal

import pytest

from tests.support.fault_game import FaultGame


@pytest.fixture
def game(tmp_path, request):
    game = FaultGame(tmp_path, getattr(request, "param", 2))
    handler = signal.getsignal(signal.SIGTERM)  # the command sets its own
    yield game
    signal.signal(signal.SIGTERM, handler)
    game.end()
