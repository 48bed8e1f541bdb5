"""Log-probs in pieces against the plain way, with and without a gradient."""

import pytest
import torch

from actors.model.token_logprobs import token_logprobs

TOKENS, WIDTH, VOCABULARY = 37, 8, 50


@pytest.fixture
def task():
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    hidden = torch.randn(TOKENS, WIDTH)
    return head, hidden, torch.randint(VOCABULARY, (TOKENS,)), torch.randn(TOKENS)


class Calls:
    """A head that notes how many tokens it was given each time."""

    def __init__(self, head):
        self.tokens = []
        head.register_forward_hook(lambda _module, inputs, _output: self.tokens.append(len(inputs[0])))


def plain(head, hidden, targets, temperature):
    distribution = torch.distributions.Categorical(logits=head(hidden).float() / temperature)
    return distribution.log_prob(targets), distribution.entropy()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("at_once", [TOKENS, 10, 1])
def test_pieces_equal_the_plain_way_with_their_gradients(task, temperature, at_once):
    head, hidden, targets, upstream = task

    def outcome(way):
        here = hidden.clone().requires_grad_()
        head.zero_grad()
        logprobs, entropy = way(here)
        (logprobs * upstream).sum().backward()
        assert not entropy.requires_grad or way is plainly
        return logprobs.detach(), entropy.detach(), here.grad, head.weight.grad.clone()

    def plainly(here):
        return plain(head, here, targets, temperature)

    def in_pieces(here):
        return token_logprobs(head, here, targets, temperature=temperature, logits_at_once=at_once * VOCABULARY)

    for ours, expected in zip(outcome(in_pieces), outcome(plainly), strict=True):
        torch.testing.assert_close(ours, expected)


def test_no_piece_is_larger_than_allowed_and_each_is_made_again_in_the_backward_pass(task):
    head, hidden, targets, upstream = task
    calls = Calls(head)
    logprobs, _ = token_logprobs(head, hidden, targets, temperature=1.0, logits_at_once=10 * VOCABULARY + 7)
    assert calls.tokens == [10, 10, 10, 7]
    (logprobs * upstream).sum().backward()
    assert len(calls.tokens) == 8


def test_what_fits_is_computed_once(task):
    head, hidden, targets, upstream = task
    calls = Calls(head)
    logprobs, _ = token_logprobs(head, hidden, targets, temperature=1.0)
    (logprobs * upstream).sum().backward()
    assert calls.tokens == [TOKENS]


def test_no_tokens_are_no_logprobs(task):
    head, hidden, targets, _ = task
    logprobs, entropy = token_logprobs(head, hidden[:0], targets[:0], temperature=1.0)
    assert len(logprobs) == len(entropy) == 0
