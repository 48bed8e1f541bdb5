"""What a server's log-probs say of its weights: the judgement as a table, and asked of a stand-in with a real model."""

import json
import math
import shutil
import urllib.request

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.serving.sglang_client import NO_VERSION
from actors.weights.served_weights import (
    DTYPES,
    Distances,
    WeightsVerdict,
    _dtype,
    _measure,
    _quantised,
    check_weights,
    judge,
)
from launcher.base.errors import ModelError, RequestFailed, UsageError
from launcher.base.rollouts import Completion
from tests.programs import stand_in_server
from tests.support.real_server import MODEL
from tests.support.truthful_model import TruthfulModel

SAME, OTHER, UNKNOWN = WeightsVerdict


def distances(server, *, farthest=None, rounding=1e-3, rounding_farthest=5e-3, noise=2e-4):
    return Distances(
        server=server,
        server_farthest=server if farthest is None else farthest,
        rounding=rounding,
        rounding_farthest=rounding_farthest,
        noise=noise,
    )


def in_float32(server, **changes):
    return distances(server, rounding=0.0, rounding_farthest=0.0, **changes)


@pytest.mark.parametrize(
    ("found", "dtype", "quantised", "verdict", "reason"),
    [
        (in_float32(9e-6), "float32", "", SAME, "rounding in float32 explains up to 1e-05"),
        (in_float32(1.1e-5), "float32", "", OTHER, "explains at most 1e-05"),
        (in_float32(5e-6, farthest=1.9e-5), "float32", "", SAME, ""),
        (in_float32(5e-6, farthest=2.1e-5), "float32", "", OTHER, "the farthest prompt alone"),
        (distances(1.9e-3), "bfloat16", "", SAME, "rounding in bfloat16 explains up to 0.002"),
        (distances(2.1e-3), "bfloat16", "", UNKNOWN, "between 0.002, the most that rounding"),
        (distances(4.1e-3), "bfloat16", "", OTHER, "explains at most 0.004"),
        (distances(1e-3, farthest=0.039), "bfloat16", "", SAME, ""),
        (distances(1e-3, farthest=0.041), "bfloat16", "", OTHER, "the farthest prompt alone"),
        # a folder that overflows in the server's format says nothing of the server: its kernels are others
        (distances(3e-3, rounding=math.nan, rounding_farthest=math.nan), "float16", "", UNKNOWN, "not finite in"),
        (distances(3e-3, rounding=math.inf, rounding_farthest=math.inf), "float16", "", UNKNOWN, "not finite in"),
        (distances(1e-3, noise=math.nan), "bfloat16", "", UNKNOWN, "or with noise"),
        # where a folder is exactly what it is in the server's format, the run's own limit is left
        (distances(9e-6, rounding=0.0), "bfloat16", "", SAME, ""),
        # a format that is not known explains nothing, and is no reason to accuse
        (distances(9e-6), "", "", SAME, "rounding in float32"),
        (distances(1.1e-5), "", "", UNKNOWN, "bfloat16 would explain it, float32 would not"),
        (distances(4.1e-3), "", "", OTHER, ""),
        # fewer bits explain what noise of 10 % in every weight would do, and no more
        (distances(1.9e-3), "bfloat16", "quantization fp8", SAME, ""),
        (distances(0.019), "bfloat16", "quantization fp8", UNKNOWN, "quantised (quantization fp8)"),
        (distances(0.019, farthest=1.0), "bfloat16", "quantization fp8", UNKNOWN, "quantised"),
        (distances(0.021), "bfloat16", "quantization fp8", OTHER, ""),
        # a model that always says one token says the same with any weights
        (in_float32(0.0, noise=0.0), "float32", "", UNKNOWN, "hardly depends on its weights"),
        (in_float32(0.0, noise=0.9e-7), "float32", "", UNKNOWN, "hardly depends on its weights"),
        (in_float32(0.0, noise=1.1e-7), "float32", "", SAME, ""),
        (in_float32(1.0, noise=0.0), "float32", "", OTHER, ""),
        (in_float32(math.nan), "float32", "", UNKNOWN, "not finite"),
        (in_float32(math.inf), "float32", "", UNKNOWN, "not finite"),
    ],
)
def test_the_verdict(found, dtype, quantised, verdict, reason):
    judged = judge(found, dtype=dtype, quantised=quantised)
    assert judged.verdict is verdict, judged.reason
    assert reason in judged.reason, judged.reason


def test_it_says_how_small_a_change_it_sees():
    """Noise of 1e-3 makes 2e-4 nats: the limit of 1e-5 is that of noise of 5e-5."""
    found = judge(in_float32(4e-7), dtype="float32")
    assert (found.distance, found.limit) == (4e-7, 1e-5)
    assert (found.as_noise, found.hidden_noise) == (pytest.approx(2e-6), pytest.approx(5e-5))


@pytest.mark.parametrize(
    ("told", "config", "dtype"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "float32"),
        ({"dtype": "half"}, {}, "float16"),
        ({"dtype": "auto"}, {"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "auto"}, {"torch_dtype": "float16"}, "float16"),
        ({"dtype": "auto"}, {"dtype": "float32", "model_type": "qwen2"}, "float16"),
        ({"dtype": "auto"}, {"dtype": "float32", "model_type": "gemma3_text"}, "bfloat16"),
        ({"dtype": "auto"}, {}, "float16"),
        ({"dtype": "float8"}, {"dtype": "bfloat16"}, ""),
        ({}, {"dtype": "bfloat16"}, ""),
    ],
)
def test_the_number_format_is_the_servers_and_unknown_where_it_does_not_tell(told, config, dtype):
    assert _dtype(told, config) == dtype
    assert dtype in {"", *DTYPES.values()}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, ""),
        ({"quantization": None, "kv_cache_dtype": "auto", "torchao_config": ""}, ""),
        ({"quantization": "fp8", "kv_cache_dtype": "fp8_e5m2"}, "quantization fp8, kv_cache_dtype fp8_e5m2"),
        ({"torchao_config": "int4wo-128"}, "torchao_config int4wo-128"),
    ],
)
def test_what_the_server_keeps_in_fewer_bits(told, said):
    assert _quantised(told) == said


@pytest.mark.slow
def test_the_distances_are_means_over_tokens_and_of_the_farthest_prompt():
    """Beside the model in double precision; the second prompt's three tokens are moved by 0.3 nats."""
    model = TruthfulModel(MODEL)

    def answered(prompt, tokens, moved):
        logprobs = tuple(one + moved for one in model.logprobs(prompt, tokens))
        completion = Completion(token_ids=tokens, logprobs=logprobs, weight_version=0, finish_reason="length")
        return prompt, completion

    answers = [answered((5, 6), (7,), 0.0), answered((8, 9, 10), (11, 12, 13), 0.3)]
    exact = _measure(MODEL, answers, "float32", torch.device("cpu"))
    assert (exact.server, exact.server_farthest) == (pytest.approx(0.225, abs=1e-4), pytest.approx(0.3, abs=1e-4))
    assert exact.rounding == exact.rounding_farthest == 0.0 < exact.noise < 0.1
    rounded = _measure(MODEL, answers, "bfloat16", torch.device("cpu"))
    assert 1e-4 < rounded.rounding < rounded.rounding_farthest < 0.5
    assert (rounded.server, rounded.noise) == (exact.server, exact.noise)


# ── a server ──


@pytest.fixture(scope="module")
def stand_in():
    """Holds the model; its weights have SGLang's own label, as those of a server that nobody gave one."""
    with stand_in_server.running("--truthful", "--model-path", str(MODEL), "--weight-version", NO_VERSION) as url:
        yield url


@pytest.fixture
def server(stand_in):
    """Without the fault of the test before."""
    post(stand_in, "/stand_in/fault", {"kind": "none", "times": 0})
    return stand_in


def load(url, label):
    body = {"model_path": str(MODEL), "weight_version": label, "abort_all_requests": False}
    post(url, "/update_weights_from_disk", body)


def post(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).close()


def copy_of(folder, change=lambda weights: None):
    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
def test_the_same_weights(server):
    found = check_weights(server, MODEL)
    assert (found.verdict, found.weight_version) == (SAME, NO_VERSION), found.reason
    assert found.tokens >= 256
    assert found.as_noise < found.hidden_noise < 1e-4


@pytest.mark.slow
def test_another_number_in_one_layer(server, tmp_path):
    folder = copy_of(tmp_path / "model", lambda weights: weights["model.layers.1.mlp.down_proj.weight"].mul_(1.01))
    found = check_weights(server, folder, dtype="float32")
    assert found.verdict is OTHER
    assert found.distance > 10 * found.limit


def test_a_prompt_of_ones_own_and_few_tokens(server):
    found = check_weights(server, MODEL, prompts=iter([[5, 6, 7]] * 3), tokens=2)
    assert found.verdict is SAME
    assert 16 <= found.tokens <= 3 * 16


def test_without_a_prompt_nothing_is_known(server):
    found = check_weights(server, MODEL, prompts=[])
    assert found.verdict is UNKNOWN
    assert "0 tokens are too few" in found.reason


@pytest.mark.parametrize("prompt", [[5, 277], [-1], []])
def test_no_prompt_that_would_end_the_server_is_sent(server, prompt):
    with pytest.raises(UsageError, match="is no prompt of 277 tokens"):
        check_weights(server, MODEL, prompts=[prompt])


@pytest.mark.slow
def test_weights_that_change_meanwhile(server):
    def prompts():
        yield from [[5, 6, 7]] * 16
        load(server, "v9")
        yield from [[5, 6, 8]] * 16

    try:
        found = check_weights(server, MODEL, prompts=prompts(), tokens=10_000)
    finally:
        load(server, NO_VERSION)
    assert found.verdict is UNKNOWN
    assert "changed while the server was asked, from version default to v9" in found.reason


def test_log_probs_that_are_not_finite(server):
    post(server, "/stand_in/fault", {"kind": "nan_logprobs", "times": None})
    found = check_weights(server, MODEL)
    assert found.verdict is UNKNOWN
    assert "log-probs that are not finite" in found.reason


def test_a_token_that_the_folders_model_does_not_have(server, tmp_path):
    folder = copy_of(tmp_path / "model", shorten)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"vocab_size": 20}))
    found = check_weights(server, folder)
    assert found.verdict is UNKNOWN
    assert "has 20 tokens, the server's not as many" in found.reason


def shorten(weights):
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:20].clone()


def test_a_folder_that_is_cut_short_is_refused_before_the_server_is_asked(tmp_path):
    folder = copy_of(tmp_path / "model", lambda weights: weights.pop("model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(ModelError, match=r"1 tensors of config\.json's model are in no file"):
        check_weights("http://127.0.0.1:1", folder)


def test_a_failed_request_says_nothing_of_the_weights(server):
    post(server, "/stand_in/fault", {"kind": "503", "times": None})
    with pytest.raises(RequestFailed, match="HTTP 503"):
        check_weights(server, MODEL)
