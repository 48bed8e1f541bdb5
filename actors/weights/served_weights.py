"""Does a server hold the weights of a folder? The check of a run (`weight_consistency_check`), for any SGLang server.

    found = check_weights("http://127.0.0.1:30000", Path("/models/qwen"))
    assert found.verdict is WeightsVerdict.SAME, found.reason

The server's log-probs of greedy completions are compared with those of the folder's model. How far apart they may be is
measured on the same tokens: what the server's number format, and noise in the weights, do to the folder's own.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from actors.model.model_folder import load_model, moved
from actors.model.objective import completion_logprobs
from actors.model.token_logprobs import LogprobModel
from actors.serving.sglang_client import SGLangClient
from actors.weights.weight_consistency_check import GOLDEN_TOKENS, GREEDY, logprob_distance
from launcher.base.errors import RequestFailed, ResourceError, UsageError
from launcher.base.rollouts import Completion
from launcher.checkpoints import model_files
from launcher.config.supervision import GateConfig
from launcher.policy.admission import DISTANCE_FACTOR, SHARE_FACTOR
from launcher.run_files.run_keys import ServerKeys

Answers = Sequence[tuple[Sequence[int], Completion]]
"""Prompts, as token ids, each with its completion."""
AT_ONCE = 16
"""Prompts of one round: more would delay the server's other requests."""
SURELY = 2.0
"""With the same weights the distance was 0.6 to 1.7 times the measured rounding (SGLang on a CPU)."""
NOISE = 1e-3
"""Relative, in each weight: little enough that the distance grows in proportion (measured from 1e-6 to 0.1)."""
MOST_NOISE = 0.1
"""About what storing weights in 4 bits does to them. Where as much noise would not show, nothing is known."""
GATE = GateConfig()
DTYPES = {name: name for name in ("float32", "bfloat16", "float16")} | {"float": "float32", "half": "float16"}
"""torch's names of SGLang's number formats."""
NOT_QUANTISED = (None, "", "auto", "bfloat16", "bf16")


class WeightsVerdict(StrEnum):
    SAME = "same weights"
    OTHER = "other weights"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distances:
    """Means of |difference of log-probs| in nats, from those of the folder's model in float32.

    `server`: the server's; `rounding`: those of the folder's model in the server's number format, in bfloat16 where
    that is not known; each also of the `farthest` prompt alone. `noise`: those of the folder's model with NOISE.
    """

    server: float
    server_farthest: float
    rounding: float
    rounding_farthest: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """`distance`: of the server's log-probs from the folder's, in nats; up to `limit` they are the same weights.

    `as_noise`: about as much relative noise in every weight would cause `distance`; `hidden_noise`: about as much would
    stay within `limit`, unseen. `weight_version`: the server's label. NaN or "": not known.
    """

    verdict: WeightsVerdict
    reason: str
    tokens: int = 0
    distance: float = math.nan
    limit: float = math.nan
    as_noise: float = math.nan
    hidden_noise: float = math.nan
    weight_version: str = ""


def check_weights(
    url: str,
    folder: Path,
    *,
    prompts: Iterable[Sequence[int]] | None = None,
    tokens: int = 256,
    dtype: str = "",
    device: str = "cpu",
    api_key: str = "",
    timeout_s: float = 60.0,
) -> ServedWeights:
    """Ask the server at `url` for at least `tokens` tokens, and judge it by the model in `folder`.

    `prompts`: token ids; None: random ones, which no prefix cache can hold from before an update. `dtype`: the server's
    number format; "": the server is asked. `device`: of the folder's model, in float32. `timeout_s`: of each request.
    Not inside a running event loop. Raises RequestFailed; ModelError, ResourceError, UsageError (prompts).
    """
    model_files.refuse_own_code(folder)
    shape = model_files.read_shape(folder)
    model_files.check_weights(folder, shape)
    if device == "cuda" and not torch.cuda.is_available():
        raise ResourceError("torch finds no GPU here", "compute on the CPU: device cpu")
    chance = random.SystemRandom()
    endless = ([chance.randrange(shape.vocab) for _ in range(GOLDEN_TOKENS)] for _ in itertools.count())
    asking = _ask(url, endless if prompts is None else prompts, shape.vocab, tokens, api_key, timeout_s)
    try:
        answers, labels, server = asyncio.run(asking)
    except RequestFailed as failure:
        if failure.kind == "nonfinite":
            what = f"{failure.message}: its weights are damaged, or its float16 overflows"
        elif failure.kind == "impossible" or "out-of-vocabulary" in failure.message:
            what = f"the model in {folder} has {shape.vocab} tokens, the server's not as many: {failure.message}"
        else:
            raise
        return ServedWeights(verdict=WeightsVerdict.UNKNOWN, reason=what)
    if len(labels) > 1:
        what = f"the weights changed while the server was asked, from version {' to '.join(labels)}: ask again"
        return ServedWeights(verdict=WeightsVerdict.UNKNOWN, reason=what)
    if (count := sum(len(completion.token_ids) for _, completion in answers)) < GOLDEN_TOKENS:
        return ServedWeights(verdict=WeightsVerdict.UNKNOWN, reason=f"{count} tokens are too few: give more prompts")
    served_as = DTYPES[dtype] if dtype else _dtype(server, model_files.read_json(folder / "config.json"))
    try:
        distances = _measure(folder, answers, served_as or "bfloat16", torch.device(device))
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"{folder} does not fit into this GPU's memory", "compute on the CPU: device cpu"
        ) from error
    found = judge(distances, dtype=served_as, quantised=_quantised(server))
    return replace(found, tokens=count, weight_version=labels[0])


def judge(found: Distances, *, dtype: str, quantised: str = "") -> ServedWeights:
    """By the limits of a run's gate (`gate.distance_*`), the measured rounding in the place of its usual distance.

    `dtype`: the server's number format, "" where it is not known; `quantised`: what it keeps in fewer bits, or "".
    """
    exact = GATE.distance_float32 or 0.0
    limit = max(exact, SURELY * found.rounding) if dtype else exact
    as_noise, hidden = (NOISE * by / found.noise if found.noise else math.inf for by in (found.server, limit))
    most = max(exact, DISTANCE_FACTOR * found.rounding)
    farthest = SHARE_FACTOR * max(exact, DISTANCE_FACTOR * found.rounding_farthest)
    verdict = WeightsVerdict.UNKNOWN
    if not math.isfinite(found.server):
        reason = "the folder's model gives log-probs that are not finite"
    elif not math.isfinite(found.rounding + found.rounding_farthest + found.noise):
        rounded = dtype or "bfloat16"
        reason = f"the folder's model gives log-probs that are not finite in {rounded}, or with noise in its weights"
    elif quantised and limit < found.server and as_noise <= MOST_NOISE:
        reason = f"the server is quantised ({quantised}), which may explain as much"
    elif found.server > most:
        verdict, reason = WeightsVerdict.OTHER, f"rounding in {dtype or 'bfloat16'} explains at most {most:.2g}"
    elif found.server_farthest > farthest:
        where = "is one of several servers at this address another, or a prefix cache older?"
        apart = f"the farthest prompt alone is {found.server_farthest:.2g} apart, more than {farthest:.2g}"
        verdict, reason = WeightsVerdict.OTHER, f"{apart}: {where}"
    elif found.server > limit:
        reason = f"between {limit:.2g}, the most that rounding in {dtype} usually makes, and {most:.2g}"
        if not dtype:
            reason = "bfloat16 would explain it, float32 would not: give the number format that the server computes in"
    elif hidden > MOST_NOISE:
        reason = "what the server answers hardly depends on its weights: give other prompts"
    else:
        verdict, reason = WeightsVerdict.SAME, f"rounding in {dtype or 'float32'} explains up to {limit:.2g}"
    return ServedWeights(
        verdict=verdict,
        reason=reason,
        distance=found.server,
        limit=limit,
        as_noise=as_noise,
        hidden_noise=hidden,
    )


async def _ask(
    url: str, prompts: Iterable[Sequence[int]], vocabulary: int, tokens: int, api_key: str, timeout_s: float
) -> tuple[Answers, list[str], Mapping[str, Any]]:
    """Completions, the labels of the weights that made them, and the server's arguments, {} where it hides them."""
    answers: list[tuple[Sequence[int], Completion]] = []
    left = iter(prompts)
    async with SGLangClient(ServerKeys(api=api_key, admin=api_key) if api_key else None) as client:
        client.vocabulary = vocabulary
        labels = client.labels = {}
        await client.ask_for_token(url, token=vocabulary - 1, timeout_s=timeout_s)  # before a prompt ends the server
        while sum(len(one.token_ids) for _, one in answers) < tokens and (asked := [*itertools.islice(left, AT_ONCE)]):
            if wrong := [one for one in asked if not one or min(one) < 0 or max(one) >= vocabulary]:  # it would end it
                raise UsageError(f"{list(wrong[0])} is no prompt of {vocabulary} tokens", "give ids of its vocabulary")
            requests = (client.generate(url, token_ids=one, sampling=GREEDY, timeout_s=timeout_s) for one in asked)
            answers += zip(asked, await asyncio.gather(*requests), strict=True)
        try:
            return answers, [*labels], await client.server_info(url, timeout_s=timeout_s)
        except RequestFailed:
            return answers, [*labels], {}


def _measure(folder: Path, answers: Answers, dtype: str, device: torch.device) -> Distances:
    servers = [completion.logprobs for _, completion in answers]
    model = _load(folder, "float32", device)
    exact = _logprobs(model, answers, device)
    generator = torch.Generator(device).manual_seed(0)  # the same noise each time: figures can be compared
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=generator, device=device))
    noisy = _logprobs(model, answers, device)
    del model  # else two are in memory at once
    rounded = exact if dtype == "float32" else _logprobs(_load(folder, dtype, device), answers, device)
    return Distances(
        server=_mean_distance(servers, exact),
        server_farthest=max(map(logprob_distance, servers, exact)),
        rounding=_mean_distance(rounded, exact),
        rounding_farthest=max(map(logprob_distance, rounded, exact)),
        noise=_mean_distance(noisy, exact),
    )


def _load(folder: Path, dtype: str, device: torch.device) -> LogprobModel:
    number_format: torch.dtype = getattr(torch, dtype)
    model = load_model(folder, dtype=number_format, attn_implementation="sdpa", key="the model folder")
    return LogprobModel(moved(model, device))


def _logprobs(model: LogprobModel, answers: Answers, device: torch.device) -> list[list[float]]:
    texts = [(prompt, completion.token_ids) for prompt, completion in answers]
    rounds = (texts[at : at + AT_ONCE] for at in range(0, len(texts), AT_ONCE))
    return [one for some in rounds for one in completion_logprobs(model, some, device=device, dtype=torch.float32)]


def _mean_distance(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    return logprob_distance([*itertools.chain(*some)], [*itertools.chain(*others)])


def _dtype(server: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The number format that the server computes in, by its arguments; "" where they do not tell."""
    told = str(server.get("dtype"))
    if told == "auto":  # as SGLang 0.5.17 chooses it (configs/model_config.py)
        told = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        if told == "float32":
            told = "bfloat16" if str(config.get("model_type")).startswith("gemma") else "float16"
    return DTYPES.get(told, "")


def _quantised(server: Mapping[str, Any]) -> str:
    told = {key: server.get(key) for key in ("quantization", "torchao_config", "kv_cache_dtype")}
    return ", ".join(f"{key} {value}" for key, value in told.items() if value not in NOT_QUANTISED)
