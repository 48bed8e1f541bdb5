"""How often what is drawn by chance is tried: a few times with every change, many times before a claim is made."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=None, help="of the tests in tests/chaos, in place of a few")


@pytest.fixture
def kills(request):
    """`kills(6)`: how many to make, 6 unless --kills says otherwise."""
    return lambda few: request.config.getoption("--kills") or few
