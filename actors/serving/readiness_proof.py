"""The generation that makes a server READY: asked as the run will ask. Kernels that are compiled at their first use are
compiled before the server has traffic then, and its silence meanwhile is that of a start and not of a hang.

On a GPU the first use of `top_p` or `top_k` has FlashInfer build its sampling module, and the first batch of several
sequences another kernel: tens of seconds in which a server answers nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from actors.serving.completions import CompletionStream
from actors.serving.sglang_client import Sampling, SGLangClient
from launcher.base.errors import RequestFailed
from launcher.config.schema import RunConfig

MOST_SAMPLES = 8
USUAL_PROMPT = 256
MOST_TOKENS = 8
LEAST_TOKENS = 2
"""The first comes from the prefill, the second from a decode step."""
PLENTY = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessProof:
    """`samples` completions of one prompt of `prompt_tokens`."""

    sampling: Sampling
    samples: int
    prompt_tokens: int

    @classmethod
    def of(cls, config: RunConfig) -> ReadinessProof:
        """With the run's own sampling, and as many samples and tokens as its settings leave room for."""
        samples = min(config.gconfig.n_samples, MOST_SAMPLES)
        tokens = max(LEAST_TOKENS, min(config.gconfig.max_new_tokens, MOST_TOKENS))
        pool = (config.sglang.max_total_tokens or PLENTY) - samples * tokens
        context = (config.sglang.context_length or PLENTY) - tokens
        longest = min(config.train_dataset.max_length or USUAL_PROMPT, USUAL_PROMPT)
        sampling = Sampling.from_config(config.gconfig)
        return cls(
            sampling=replace(sampling, max_new_tokens=tokens, min_new_tokens=LEAST_TOKENS),
            samples=samples,
            prompt_tokens=max(1, min(longest, context // 2, pool // (samples + 1))),
        )

    async def give(self, client: SGLangClient, url: str, *, timeout_s: float) -> int:
        """The weight version that the tokens came from. Raises RequestFailed."""
        answer = await client.generate_samples(
            url,
            CompletionStream(self.samples, server=url),
            inputs=[[0] * self.prompt_tokens] * self.samples,
            samplings=[self.sampling] * self.samples,
            timeout_s=timeout_s,
        )
        if answer.failure is not None:
            raise answer.failure
        versions = {completion.weight_version for completion in answer.completions.values()}
        if len(versions) > 1:
            raise RequestFailed(f"{url} generated with several weight versions: {sorted(versions)}")
        return versions.pop()


SHORT = ReadinessProof(
    sampling=Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=2, min_new_tokens=2),
    samples=1,
    prompt_tokens=1,
)
"""Of a server without a run."""
