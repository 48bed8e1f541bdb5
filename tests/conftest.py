"""How much is tried: a little with every change, more before a claim is made.

--kills N          so many, in the tests of tests/chaos that draw by chance
--long             tests marked `long` too: the same as others that are run each time, with more or longer faults
--minutes N        how long tests/chaos/test_soak.py leaves a run alone
--real-servers     the real SGLang in tests/chaos/test_lost_nodes.py, in place of stand-ins
"""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared machine", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")  # how fast examples are drawn says how busy the machine is


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=None, help="of the tests in tests/chaos, in place of a few")
    parser.addoption("--long", action="store_true", help="tests marked `long` too")
    parser.addoption("--minutes", type=float, default=5.0, help="of tests/chaos/test_soak.py")
    parser.addoption("--real-servers", action="store_true", help="the real SGLang in tests/chaos/test_lost_nodes.py")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: --long runs it"))


@pytest.fixture
def kills(request):
    """`kills(6)`: how many to make, 6 unless --kills says otherwise."""
    return lambda few: request.config.getoption("--kills") or few
