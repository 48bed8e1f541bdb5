"""HTTP client for the SGLang endpoints that we use, typed. No Ray, no torch at import.

Every answer is either complete and valid, or a `RequestFailed` with what was wrong (P1).

SGLang keeps weight versions as strings, ours are integers. Each update sends one, since without it the server keeps
the old label on the new weights, and asks the server for it afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from actors.serving.completions import CompletionStream, Samples, completion_from, malformed
from actors.serving.server_connection import ServerConnection
from launcher.base.errors import RequestFailed as RequestFailed
from launcher.base.errors import WeightsRefused
from launcher.base.rollouts import Completion
from launcher.config.schema import GenerationConfig

if TYPE_CHECKING:
    from actors.serving.weight_buckets import WeightBucket

CONFIGURED = ("temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens")
"""Sampling parameters that are settings of ours, under SGLang's own names."""
ANSWER_S = 1.0
"""What is left for an answer after a deadline spent otherwise."""
NO_VERSION = "default"
"""SGLang's own label of weights that were given none."""
ONLY_WHEN_WHOLE = 2**30
"""A `stream_interval` that is longer than any completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. A model's own end tokens end a completion in any case; `stop_token_ids` are further ones.

    `seed` makes one request reproducible where the server runs with --enable-deterministic-inference, and is ignored
    by it elsewhere.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    @classmethod
    def from_config(cls, config: GenerationConfig, stop_token_ids: Sequence[int] = ()) -> Sampling:
        return cls(**{name: getattr(config, name) for name in CONFIGURED}, stop_token_ids=tuple(stop_token_ids))

    def for_samples(self, n: int) -> list[Sampling]:
        """Of `n` samples of one prompt: with one seed for all they would be n times the same."""
        return [self if self.seed is None else replace(self, seed=self.seed + index) for index in range(n)]

    def after(self, n_tokens: int) -> Self:
        """For what is left of a completion of which `n_tokens` are there. SGLang draws by a seed and the position in
        the sequence, so the seed stays."""
        return replace(
            self,
            max_new_tokens=self.max_new_tokens - n_tokens,
            min_new_tokens=max(0, self.min_new_tokens - n_tokens),
        )

    def parameters(self) -> dict[str, object]:
        """SGLang's `sampling_params`."""
        parameters: dict[str, object] = {name: getattr(self, name) for name in CONFIGURED}
        if self.stop_token_ids:
            parameters["stop_token_ids"] = self.stop_token_ids
        if self.seed is not None:
            parameters["sampling_seed"] = self.seed
        return parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a server reports of its model. `weight_version` is None where it was started without one ("default")."""

    model_path: str
    weight_version: int | None


class SGLangClient(ServerConnection):
    """One HTTP session to any number of servers, used on one asyncio loop.

    Every method takes the server's `url` and a deadline `timeout_s`, and raises RequestFailed. `vocabulary`: how many
    tokens the model has; None where that is not known. `labels`: as of `completion_from`, of `generate` alone.
    """

    vocabulary: int | None = None
    labels: dict[str, int] | None = None

    # ── generation ──

    async def generate(self, url: str, *, token_ids: Sequence[int], sampling: Sampling, timeout_s: float) -> Completion:
        """One completion of `token_ids` with the log-prob of each of its tokens.

        Measured on 0.5.17 (CPU, float32, against transformers): the log-probs are those of the logits divided by the
        temperature, over all tokens, whatever top_p and top_k leave of them. At temperature 0 SGLang sets the
        temperature to 1, so they are the model's own. The end token is part of the completion.
        """
        body = {
            "input_ids": token_ids,
            "sampling_params": sampling.parameters(),
            "return_logprob": True,
        }
        answer = await self._json("POST", url, "/generate", timeout_s, body)
        return completion_from(answer, server=url, vocabulary=self.vocabulary, labels=self.labels)

    async def generate_samples(
        self,
        url: str,
        stream: CompletionStream,
        *,
        inputs: Sequence[Sequence[int]],
        samplings: Sequence[Sampling],
        timeout_s: float,
        stream_interval: int = ONLY_WHEN_WHOLE,
    ) -> Samples:
        """Completions of each input as `generate` gives them, in one request. Raises no RequestFailed: the answer has
        it. `stream` has what arrived, also where the caller is cancelled.

        One request for all costs the server three quarters of what a request for each does, and us a fifth. A
        completion is sent as soon as it is complete, and before in parts of `stream_interval` tokens.
        """
        stream.vocabulary = self.vocabulary
        # negative: a positive one would send each completion's first token by itself
        parameters = [{**each.parameters(), "stream_interval": -stream_interval} for each in samplings]
        body = {"input_ids": inputs, "sampling_params": parameters, "return_logprob": True, "stream": True}
        try:
            async with self._response("POST", url, "/generate", timeout_s, body) as response:
                async for data in response.content.iter_any():
                    stream.feed(data)
        except RequestFailed as failure:
            return stream.samples(broken_off=failure)
        return stream.samples()

    # ── questions ──

    async def model_info(self, url: str, *, timeout_s: float) -> ModelInfo:
        """Answered by the HTTP process alone: does not show whether the server can generate."""
        answer = await self._json("GET", url, "/model_info", timeout_s)
        try:
            version = str(answer["weight_version"])
            return ModelInfo(
                model_path=answer["model_path"], weight_version=None if version == NO_VERSION else int(version)
            )
        except (KeyError, ValueError) as error:
            raise malformed(url, f"no model_path, or no weight_version of ours, in {answer}") from error

    async def server_info(self, url: str, *, timeout_s: float) -> dict[str, Any]:
        """The server's arguments as it resolved them. Never to be shown as a whole: SGLang's own keys are in it."""
        return await self._json("GET", url, "/server_info", timeout_s)

    async def ask_for_token(self, url: str, *, token: int, timeout_s: float) -> None:
        """Raises RequestFailed, http_4xx, where the model has no such token.

        SGLang 0.5.17 checks the tokens whose log-probs are asked for, and none of a prompt: a prompt with a token that
        the model does not have ends the server.
        """
        one = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=1, min_new_tokens=0)
        asked = {"return_logprob": True, "token_ids_logprob": [token]}
        body = {"input_ids": [0], "sampling_params": one.parameters(), **asked}
        await self._json("POST", url, "/generate", timeout_s, body)

    async def health(self, url: str, *, timeout_s: float) -> bool:
        """SGLang's own view of its health, a hint only: 200 with a stopped detokenizer, 503 while draining or busy."""
        try:
            await self._answer("GET", url, "/health", timeout_s)
        except RequestFailed as failure:
            if failure.kind == "http_5xx":
                return False
            raise
        return True

    async def metrics(self, url: str, *, timeout_s: float) -> dict[str, float]:
        """Prometheus series by name, summed over their labels."""
        series: dict[str, float] = {}
        for line in (await self._answer("GET", url, "/metrics/", timeout_s)).decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name and not line.startswith("#"):
                name = name.partition("{")[0]
                series[name] = series.get(name, 0.0) + float(value)
        return series

    # ── weights ──

    async def update_weights_from_disk(self, url: str, *, path: Path, weight_version: int, timeout_s: float) -> None:
        """Load the model folder at `path`, which the server must be able to read. Running requests are aborted.

        Verify the folder before: SGLang answers 200 to one with missing tensors or NaN, and dies of a truncated one.
        Raises WeightsRefused where the server says no or another version afterwards.
        """
        await self._update(url, "/update_weights_from_disk", {"model_path": str(path)}, weight_version, timeout_s)

    async def update_weights_from_tensor(
        self,
        url: str,
        *,
        buckets: Sequence[WeightBucket],
        weight_version: int,
        timeout_s: float,
        tp_size: int = 1,
    ) -> None:
        """Load weights straight from this process's memory, on the same machine, a bucket a request: in one bucket, all
        its tensors would be held beside it while it is filled. Requests are aborted.

        A request carries a handle, not values (see `weight_buckets.py`). Until the last bucket the server has no
        version. Raises WeightsRefused where it says no or another version afterwards; then a part of its weights may
        be the new ones.
        """
        from actors.serving.weight_buckets import handle_of  # torch, which most users of this module do without

        deadline = time.monotonic() + timeout_s
        for bucket in buckets:
            handles = [handle_of(bucket) for _ in range(tp_size)]
            weights = {"serialized_named_tensors": handles, "load_format": "flattened_bucket"}
            label = weight_version if bucket is buckets[-1] else None
            await self._update(url, "/update_weights_from_tensor", weights, label, _until(deadline))

    async def join_update_group(
        self, url: str, *, name: str, address: str, port: int, backend: str, tp_size: int, timeout_s: float
    ) -> None:
        """Have a server's ranks be 1 to `tp_size` of a torch.distributed group, whose rank 0 keeps the store at that
        address and port. Answered when all are there; until then the server does nothing else.
        """
        group = {"group_name": name, "master_address": address, "master_port": port, "backend": backend}
        ranks = {"rank_offset": 1, "world_size": 1 + tp_size}
        await self._answer("POST", url, "/init_weights_update_group", timeout_s, {**group, **ranks}, admin=True)

    async def update_weights_from_distributed(
        self, url: str, *, group: str, bucket: WeightBucket, weight_version: int | None, timeout_s: float
    ) -> None:
        """Have a server take a bucket that rank 0 of the group broadcasts meanwhile. Requests are aborted.

        `weight_version` None: others follow, and until the last it has no version. Raises WeightsRefused where the
        server says no or another version afterwards; then a part of its weights may be the new ones.
        """
        weights = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
        }
        await self._update(url, "/update_weights_from_distributed", weights, weight_version, timeout_s)

    async def _update(
        self, url: str, path: str, weights: Mapping[str, object], weight_version: int | None, timeout_s: float
    ) -> None:
        """Update; after the last of the weights ask for the version, then flush the prefix cache, which holds what the
        old weights computed. `weight_version` None: others follow, and until the last no request is sent there.

        Not in one request: asked to flush within an update, SGLang 0.5.17 dies of "Cache flush failed after updating
        weights" wherever the last request, finished or aborted, hasn't yet left its scheduler's batch.
        """
        what = f"{url} and weight version {weight_version}"
        deadline = time.monotonic() + timeout_s
        label = NO_VERSION if weight_version is None else str(weight_version)
        order = {"weight_version": label, "abort_all_requests": True, "flush_cache": False}
        try:
            await self._answer("POST", url, path, timeout_s, {**weights, **order}, admin=True)
            if weight_version is None:
                return
            held = (await self.model_info(url, timeout_s=_until(deadline))).weight_version
            await self.flush_cache(url, timeout_s=_until(deadline))
        except RequestFailed as failure:
            if failure.kind in {"http_4xx", "http_5xx"}:
                raise WeightsRefused(f"{what}: {failure.message}", failure.hint) from failure
            raise
        if held != weight_version:
            raise WeightsRefused(f"{what}: it took the update and then reported that it holds version {held}")

    # ── control ──

    async def flush_cache(self, url: str, *, timeout_s: float) -> None:
        """Forget all prefixes. Waits for running requests; http_4xx where they have not ended in time."""
        await self._answer("POST", url, f"/flush_cache?timeout={timeout_s:g}", timeout_s + ANSWER_S, admin=True)


def _until(deadline: float) -> float:
    return max(deadline - time.monotonic(), ANSWER_S)
