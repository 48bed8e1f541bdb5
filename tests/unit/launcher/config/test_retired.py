"""Settings that have gone are accepted for one version, from wherever they were given, with one line each."""

import pytest

from launcher.base.errors import ConfigError
from launcher.config import compose as composing
from launcher.config import retired
from launcher.config.schema import RunConfig
from launcher.config.settings import settings_of


@pytest.fixture
def compose(monkeypatch):
    """As the launcher composes once `recovery.spare_wheels` and `wheels` have gone."""
    gone = {"recovery.spare_wheels": "four wheels are enough", "wheels": "none is left"}
    monkeypatch.setattr(retired, "RETIRED", gone)
    retired.report_retired.cache_clear()
    return lambda *overrides: composing.compose(["conf=arithmetic_cpu", *overrides])


def test_a_retired_key_does_nothing_and_is_named_once(compose, capsys):
    as_usual = compose()
    assert capsys.readouterr().err == ""
    assert compose("recovery.spare_wheels=2", "wheels=round") == as_usual
    assert compose("recovery.spare_wheels=null") == as_usual
    assert capsys.readouterr().err.splitlines() == [
        "note: recovery.spare_wheels does nothing any more: four wheels are enough",
        "note: wheels does nothing any more: none is left",
    ]


def test_a_preset_may_still_have_it(compose, tmp_path, capsys):
    preset = tmp_path / "conf" / "mine.yaml"
    preset.parent.mkdir()
    preset.write_text("# @package _global_\ndefaults: [arithmetic_cpu]\nrecovery: {spare_wheels: 1}\n")
    as_usual = compose()
    assert compose("conf=mine", f"hydra.searchpath=[file://{tmp_path}]") == as_usual
    assert "recovery.spare_wheels does nothing any more" in capsys.readouterr().err


def test_other_keys_are_refused_as_before(compose):
    with pytest.raises(ConfigError, match=r"recovery\.spare_wheel"):
        compose("recovery.spare_wheel=2")


def test_each_that_has_gone_is_accepted(capsys):
    """All at once: each that were refused would be named in one message, as any wrong key is."""
    retired.report_retired.cache_clear()
    given = [f"{key}=1" for key in retired.RETIRED]
    assert composing.compose(["conf=arithmetic_cpu", *given]) == composing.compose(["conf=arithmetic_cpu"])
    said = capsys.readouterr().err.splitlines()
    assert sorted(said) == sorted(f"note: {key} does nothing any more: {why}" for key, why in retired.RETIRED.items())


def test_no_setting_is_retired_and_there():
    assert not {one.key for one in settings_of(RunConfig)} & retired.RETIRED.keys()
