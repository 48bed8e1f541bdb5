"""A server is believed by its log-probs, not by its label."""

import pytest

from actors.weights.weight_consistency_check import (
    GREEDY,
    TRIES,
    GoldenComparison,
    golden_distance,
    golden_limit,
    logprob_distance,
)
from launcher.base.errors import RequestFailed, WeightsRefused
from launcher.base.rollouts import Completion
from launcher.config.schema import ActorConfig, RunConfig, SGLangConfig


def answer(*logprobs, version=3):
    return Completion(token_ids=(7,) * len(logprobs), logprobs=logprobs, weight_version=version, finish_reason="length")


async def asked(generate, own, *, limit=1e-5, settled=lambda: 3, within_s=60.0):
    async def answered():
        return generate()

    async def compare(answer):
        version, logprobs = own(answer.token_ids)
        return GoldenComparison(version=version, distance=logprob_distance(answer.logprobs, logprobs))

    return await golden_distance(answered, compare, limit=limit, name="server-1", settled=settled, within_s=within_s)


async def compared_as(comparison, answer):
    """What comes of an answer that is compared so."""

    async def generate():
        return answer

    async def compare(_):
        return comparison

    version = comparison.version
    return await golden_distance(generate, compare, limit=1e-5, name="server-1", settled=lambda: version, within_s=60.0)


async def probe(answers, own, limit=1e-5):
    left = list(answers)
    return await asked(lambda: left.pop(0), own, limit=limit)


async def test_the_same_weights_pass():
    assert await probe([answer(-1.0, -2.0)], lambda ids: (3, [-1.0, -2.000001])) < 1e-5


@pytest.mark.parametrize("own", [[-1.0, -2.01], [-1.0, float("nan")]])
async def test_other_weights_under_the_right_label_are_refused(own):
    with pytest.raises(WeightsRefused, match="server-1 says weight version 3, but its log-probs are"):
        await probe([answer(-1.0, -2.0)], lambda ids: (3, own))


async def test_an_answer_from_the_version_before_is_asked_for_again():
    answers = [answer(-9.0, version=2), answer(-1.0, version=3)]
    assert await probe(answers, lambda ids: (3, [-1.0])) == 0.0


async def test_where_nobody_can_be_compared_with_its_label_alone_counts():
    nobody = GoldenComparison(version=3, distance=None)
    assert await compared_as(nobody, answer(-1.0)) is None


async def test_a_refusal_names_whose_log_probs_were_compared():
    far = GoldenComparison(version=0, distance=0.5, whom="server-2")
    with pytest.raises(WeightsRefused, match=r"its log-probs are 0\.5 from those of server-2, more than 1e-05"):
        await compared_as(far, answer(-1.0, version=0))


async def test_a_label_that_never_is_ours_is_refused():
    with pytest.raises(WeightsRefused, match="version 2, not 3"):
        await probe([answer(-1.0, version=2)] * TRIES, lambda ids: (3, [-1.0]))


@pytest.mark.parametrize(("aborted", "passes"), [(TRIES - 1, True), (TRIES, False)])
async def test_an_answer_that_new_weights_aborted_is_asked_for_again_and_not_for_ever(aborted, passes):
    left = [RequestFailed("aborted after 3 tokens", kind="aborted")] * aborted

    def generate():
        if left:
            raise left.pop()
        return answer(-1.0)

    if passes:
        assert await asked(generate, lambda ids: (3, [-1.0])) == 0.0
    else:
        with pytest.raises(RequestFailed, match="aborted"):
            await asked(generate, lambda ids: (3, [-1.0]))


class Steps:
    """A trainer that publishes a version while each of the first answers is made; its server says the one before."""

    def __init__(self, publishes, *, ends_on_abort):
        self.version = 3
        self.left = publishes
        self.ends_on_abort = ends_on_abort
        self.is_publishing = False

    def settled(self):
        on_its_way = self.is_publishing
        self.is_publishing = False
        return None if on_its_way else self.version

    def generate(self):
        before = self.version
        if self.left:
            self.left = self.left - 1
            self.version = self.version + 1
            self.is_publishing = True
            if self.ends_on_abort:
                raise RequestFailed("aborted after 3 tokens", kind="aborted")
        return answer(-1.0, version=before)


@pytest.mark.parametrize("ends_on_abort", [False, True])
async def test_what_was_asked_across_a_publish_is_asked_again_and_not_counted(ends_on_abort):
    """Three in a row refused a sound server, which was sent its weights again for it."""
    trial = Steps(7, ends_on_abort=ends_on_abort)
    assert await asked(trial.generate, lambda ids: (trial.version, [-1.0]), settled=trial.settled) == 0.0


async def test_an_answer_begun_before_a_publish_accuses_nobody_under_the_label_of_after_it():
    """Its prompt may be cached of the version before: a sound server was refused for 2.5e-4."""
    versions = [2, 3, 3]
    answers = [answer(-9.0), answer(-1.0)]
    assert await asked(lambda: answers.pop(0), lambda ids: (3, [-1.0]), settled=lambda: versions.pop(0)) == 0.0


async def test_nothing_is_asked_while_weights_are_on_their_way():
    moments = [None, None, 3]
    assert await asked(lambda: answer(-1.0), lambda ids: (3, [-1.0]), settled=lambda: moments.pop(0)) == 0.0


async def test_one_to_whom_weights_are_always_on_their_way_is_not_asked_for_ever():
    with pytest.raises(WeightsRefused, match="version 2, not 3"):
        await asked(lambda: answer(-1.0, version=2), lambda ids: (3, [-1.0]), settled=lambda: None, within_s=0.0)


def test_no_token_is_masked_in_the_server_that_the_trainer_counts():
    """A least number of tokens masks the end tokens, so that all others gain what these had: 3e-4 in a model that ends
    with a chance of 1 in 277, which is no other weights."""
    assert GREEDY.min_new_tokens == 0


def test_the_limit_follows_what_is_usual_in_float32_alone():
    """Sixteen tokens in bfloat16 are no batch: a sound server whose few tokens are far must not be refused for it."""
    small = RunConfig(experiment_name="limits", sglang=SGLangConfig(dtype="bfloat16"))
    assert golden_limit(small, 0.03) == golden_limit(small, None) == small.gate.distance_unknown
    exact = RunConfig(
        experiment_name="limits", sglang=SGLangConfig(dtype="float32"), actor=ActorConfig(dtype="float32")
    )
    assert golden_limit(exact, None) == exact.gate.distance_float32
    assert golden_limit(exact, 1.6e-5) == pytest.approx(6.4e-5)
    assert golden_limit(exact, 0.03) == pytest.approx(10 * exact.gate.distance_float32)
