"""What gave way is laid over a copy."""

import pytest

from actors.serving.setting_overrides import with_overrides
from launcher.config.schema import RunConfig


def test_each_key_is_set_and_the_original_stays():
    config = RunConfig(experiment_name="x")
    changed = with_overrides(config, {"sglang.mem_fraction_static": 0.6, "actor.mb_spec.max_tokens_per_mb": 512})
    assert (changed.sglang.mem_fraction_static, changed.actor.mb_spec.max_tokens_per_mb) == (0.6, 512)
    assert (config.sglang.mem_fraction_static, config.actor.mb_spec.max_tokens_per_mb) == (0.8, 16384)


def test_a_key_that_is_none_is_refused():
    with pytest.raises(KeyError, match=r"sglang\.memory"):
        with_overrides(RunConfig(experiment_name="x"), {"sglang.memory": 1})
