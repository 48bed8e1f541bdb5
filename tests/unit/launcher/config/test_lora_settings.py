"""actor.use_lora: what contradicts itself is refused, and what a resume must not change is recorded."""

import pytest

from launcher.config.fingerprint import config_fingerprint, fingerprint_differences
from launcher.config.lora import FUSED, MATRICES, LoraConfig, find_lora_problems
from launcher.config.schema import ActorConfig, RunConfig


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        ({"lora_rank": 8}, "actor.lora_rank", "not given without actor.use_lora=true"),
        ({"lora_alpha": 1.0}, "actor.lora_alpha", "not given without"),
        ({"target_modules": ["q_proj"]}, "actor.target_modules", "not given without"),
        ({"use_lora": True, "target_modules": ["q_proj", "lm_head"]}, "actor.target_modules", "lm_head can't have"),
        ({"use_lora": True, "target_modules": ["qproj"]}, "actor.target_modules", "of q_proj, k_proj"),
    ],
)
def test_one_line_names_the_key_and_what_is_allowed(settings, key, said):
    ((found, line),) = find_lora_problems(LoraConfig(**settings))
    assert found == key
    assert said in line


def test_all_matrices_are_meant_where_none_is_named():
    assert LoraConfig(use_lora=True).adapted == (*MATRICES, *FUSED)
    assert not list(find_lora_problems(LoraConfig(use_lora=True, lora_rank=4, target_modules=["v_proj"])))


def test_a_resume_with_other_adapters_is_told_and_one_without_any_is_as_ever():
    def fingerprint(**settings):
        return config_fingerprint(RunConfig(actor=ActorConfig(path="nowhere", **settings)))

    plain, small = fingerprint(), fingerprint(use_lora=True, lora_rank=4)
    assert not any("lora" in key for key in plain)
    told = [str(one) for one in fingerprint_differences(small, fingerprint(use_lora=True, lora_rank=8))]
    assert told == [
        "actor.lora_rank was 4, is 8: the saved state is of adapters of another rank, or of a model without them"
    ]
    assert {one.key for one in fingerprint_differences(plain, small)} == {
        "actor.lora_rank",
        "actor.lora_alpha",
        "actor.target_modules",
    }
    assert not fingerprint_differences(small, fingerprint(use_lora=True, lora_rank=4, target_modules=list(MATRICES)))


def test_the_names_are_those_of_areal():
    assert {"use_lora", "lora_rank", "lora_alpha", "target_modules"} <= set(ActorConfig.__dataclass_fields__)
