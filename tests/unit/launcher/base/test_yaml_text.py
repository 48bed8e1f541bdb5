"""YAML text as plain values, by libyaml or without it."""

import pytest
import yaml

from launcher.base import yaml_text
from launcher.base.yaml_text import dump_yaml, load_yaml

VALUES = {"b": 1, "a": [1.5, None, True, "ä→字"], "c": {"text": "3.10", "empty": ""}}


@pytest.fixture(params=["libyaml", "PyYAML alone"])
def parser(request, monkeypatch):
    if request.param == "PyYAML alone":
        monkeypatch.setattr(yaml_text, "_LOADER", yaml.SafeLoader)
        monkeypatch.setattr(yaml_text, "_DUMPER", yaml.SafeDumper)
    else:
        assert yaml.__with_libyaml__, "the PyYAML that constraints.txt names has it"


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.getpid []",
        "!!python/name:os.system ''",
        "!!python/module:os ''",
        "!!python/object/new:os._Environ [{}]",
        "a: &x [*x",
    ],
)
def test_what_would_run_code_or_is_no_yaml_is_an_error(text):
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)


@pytest.mark.usefixtures("parser")
def test_values_come_back_in_their_order_and_letters_stay_as_they_are():
    text = dump_yaml(VALUES)
    assert list(load_yaml(text)) == list(VALUES)
    assert load_yaml(text.encode()) == VALUES
    assert "ä→字" in text
