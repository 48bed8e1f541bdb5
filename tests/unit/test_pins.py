"""constraints.txt pins all that is installed, and .ci/pins.py says what holds a pin back."""

import importlib.util
import re
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from launcher.config.compose import REPOSITORY


@pytest.fixture(scope="module")
def pins():
    spec = importlib.util.spec_from_file_location("pins", REPOSITORY / ".ci" / "pins.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_holds_exact_versions_in_order_and_names_no_index(pins):
    lines = [line for line in pins.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)] == []
    assert len(pins.pins("\n".join(lines))) == len(lines), "a package is pinned twice"


@pytest.mark.slow
def test_all_that_is_required_is_pinned_and_installed_so(pins):
    own = pins.project()
    extras = own["optional-dependencies"]
    asked = [*own["dependencies"], *(one for name in ("test", "s3", "lora") for one in extras[name])]
    required = pins.requirements(asked).keys() - {"pip"}
    pinned = pins.pins(pins.CONSTRAINTS.read_text())
    assert required - pinned.keys() == set(), "not pinned"
    assert {name: version(name) for name in required if Version(version(name)) != pinned[name]} == {}


def test_a_pin_is_held_by_the_requirement_that_excludes_its_newest(pins):
    needs = {
        "top": ["middle[fast]", "windows-only; sys_platform == 'win32'"],
        "middle": ["base<2", "quick==1.*; extra == 'fast'", "slow; extra == 'careful'"],
    }
    required = pins.requirements(["Top>=1"], lambda name: needs.get(name, ()))
    assert required.keys() == {"top", "middle", "base", "quick"}
    pinned = {name: Version("1.0") for name in required}
    newer = {"base": Version("2.0"), "quick": Version("1.5"), "top": Version("3.0")}
    of_pip = {"top": ["top 3.0 depends on middle>2"]}
    held, free = pins.lines(pinned, newer, required, lambda name, _: of_pip.get(name, []))
    assert held == [
        "base 1.0, newest 2.0: middle requires base<2",
        "top 1.0, newest 3.0: top 3.0 depends on middle>2",
    ]
    assert free == ["quick 1.0, newest 1.5: nothing holds it back"]


def test_a_requirement_is_named_once(pins):
    required = pins.requirements(["a", "b"], {"a": ["c<2"], "b": ["c<2", "a"]}.get)
    assert sorted(required["c"], key=str) == [("a", Requirement("c<2")), ("b", Requirement("c<2"))]
