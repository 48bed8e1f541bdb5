"""CUDA graphs for what a server can have in flight, and no more (sglang.cuda_graph_max_bs_decode)."""

import pytest

from actors.serving.sglang_command import command
from launcher.resources.config_checks import find_problems
from launcher.resources.cuda_graphs import LARGEST, MIB, graph_bytes, prefill_sizes, sequences_at_once, with_graphs
from tests.support.composed import composed
from tests.support.preflight_parts import changed

GSM8K = composed("conf=gsm8k_h200")
AT_ONCE = GSM8K.rollout.max_concurrent_rollouts * GSM8K.gconfig.n_samples


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, AT_ONCE),
        ({"sglang__n_servers": 3}, -(-AT_ONCE // 3)),
        ({"sglang__n_servers": 2, "sglang__dp_size": 4}, AT_ONCE // 8),
        ({"sglang__max_running_requests": 48}, 48),
        ({"rollout__max_concurrent_rollouts": 4096}, LARGEST),
        ({"rollout__max_concurrent_rollouts": 1, "sglang__n_servers": 8}, 1),
    ],
)
def test_a_server_has_graphs_for_its_part_of_what_is_in_flight(settings, expected):
    config = changed(GSM8K, **settings)
    assert sequences_at_once(config) == with_graphs(config).cuda_graph_max_bs_decode == expected


def test_what_is_set_stays_and_the_configuration_is_not_changed():
    assert with_graphs(changed(GSM8K, sglang__cuda_graph_max_bs_decode=24)).cuda_graph_max_bs_decode == 24
    assert GSM8K.sglang.cuda_graph_max_bs_decode is None
    assert graph_bytes(changed(GSM8K, sglang__cuda_graph_max_bs_decode=24), 8192) == (2 * 24 + 8 * 58) * MIB


def test_sizes_of_a_prefill_are_counted_as_sglang_makes_them():
    assert [prefill_sizes(most) for most in (3, 4, 40, 2048, 8192)] == [0, 1, 8, 42, 58]


def words(config, device):
    return command(
        config, entry=(), device=device, index=0, generation=0, model_path="/m", weight_version=0, port=30000
    )


def test_a_server_on_a_gpu_is_told_and_one_on_the_cpu_is_not():
    given = words(with_graphs(GSM8K), "cuda")
    assert given[given.index("--cuda-graph-max-bs-decode") + 1] == str(AT_ONCE)
    assert not any("cuda-graph" in word for word in words(with_graphs(GSM8K), "cpu"))


def test_sglangs_other_words_for_it_come_last_and_win():
    config = changed(GSM8K, sglang__extra_args={"cuda_graph_bs_decode": [1, 8, 64]})
    given = words(with_graphs(config), "cuda")
    assert given.index("--cuda-graph-bs-decode") > given.index("--cuda-graph-max-bs-decode")
    (problem,) = find_problems(changed(GSM8K, sglang__extra_args={"cuda-graph-max-bs-decode": 8}))
    assert "set sglang.cuda_graph_max_bs_decode instead" in str(problem)
