"""The generation that makes a server READY asks as the run does, within what the server holds."""

import asyncio

import pytest

from actors.serving.server_incarnation import ReadinessProof
from launcher.base.errors import ServerError
from launcher.base.messages import ServerState
from tests.support.composed import composed
from tests.support.machine import scaled
from tests.support.worlds.serving import make, running, start

__all__ = ["make"]
SAMPLED = ReadinessProof.of(composed("conf=arithmetic_cpu", "gconfig.top_p=0.9"))


@pytest.mark.parametrize(
    ("words", "samples", "prompt", "tokens"),
    [
        (["conf=gsm8k_h200"], 4, 256, 8),
        (["conf=gsm8k_h200_cluster"], 8, 256, 8),
        (["conf=gsm8k_h200", "train_dataset.max_length=100"], 4, 100, 8),
        (["conf=arithmetic_cpu"], 8, 124, 8),
        (["conf=arithmetic_cpu", "sglang.max_total_tokens=300", "gconfig.n_samples=2"], 2, 94, 8),
        (["conf=arithmetic_cpu", "gconfig.max_new_tokens=1", "gconfig.n_samples=2"], 2, 127, 2),
    ],
)
def test_it_is_as_large_as_usual_and_fits(words, samples, prompt, tokens):
    config = composed(*words)
    proof = ReadinessProof.of(config)
    assert (proof.samples, proof.prompt_tokens, proof.sampling.max_new_tokens) == (samples, prompt, tokens)
    assert prompt + tokens < (config.sglang.context_length or 2**30)
    assert samples * (prompt + tokens) <= (config.sglang.max_total_tokens or 2**30)


def test_it_samples_as_the_run_does():
    config = composed("conf=gsm8k_h200", "gconfig.top_p=0.9", "gconfig.top_k=50", "gconfig.temperature=0.7")
    sampling = ReadinessProof.of(config).sampling
    assert (sampling.top_p, sampling.top_k, sampling.temperature) == (0.9, 50, 0.7)


# ── with real processes ──


async def test_what_is_compiled_at_its_first_use_is_compiled_before_ready(make, tmp_path):
    """It answers nobody meanwhile: after READY that would be a hang."""
    server = make("--compiles-s", "1", proof=SAMPLED)
    compiled = "compiling, for 1 s"
    async with running(server):
        await start(server)
        starting = asyncio.create_task(server.wait_ready())
        while server.info().state is ServerState.STARTING:
            await asyncio.sleep(0.01)
        assert "kernels that are compiled at their first use" in server.info().reason
        ready = await starting
        assert (ready.state, ready.reason) == (ServerState.READY, "")
        assert (tmp_path / "llm_server-0.log").read_text().count(compiled) == 1


async def test_a_compilation_that_outlasts_the_deadline_is_told_as_one(make):
    within_s = round(scaled(3.0), 1)  # of which the stand-in takes one until it answers
    server = make("--compiles-s", "1000", setup_timeout_s=within_s, proof=SAMPLED)
    async with running(server):
        await start(server)
        what = rf"no generation within {within_s:g} s \(it answers; kernels that are compiled"
        with pytest.raises(ServerError, match=what):
            await server.wait_ready()
