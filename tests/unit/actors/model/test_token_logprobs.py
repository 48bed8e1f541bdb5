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
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_pieces_equal_the_plain_way_with_their_gradients(task, temperature, at_once, entropy_weight):
    head, hidden, targets, upstream = task

    def outcome(way):
        here = hidden.clone().requires_grad_()
        head.zero_grad()
        logprobs, entropy = way(here)
        loss = (logprobs * upstream).sum()
        if entropy_weight:
            loss = loss - entropy_weight * (entropy * upstream).sum()
        loss.backward()
        return logprobs.detach(), entropy.detach(), here.grad, head.weight.grad.clone()

    def plainly(here):
        return plain(head, here, targets, temperature)

    def in_pieces(here):
        at = at_once * VOCABULARY
        return token_logprobs(head, here, targets, temperature=temperature, logits_at_once=at, wants_entropy=True)

    for ours, expected in zip(outcome(in_pieces), outcome(plainly), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("at_once", [TOKENS, 10])
def test_an_entropy_that_is_not_asked_for_is_none_and_changes_no_bit(task, at_once):
    head, hidden, targets, upstream = task

    def outcome(wants_entropy):
        here = hidden.clone().requires_grad_()
        logprobs, entropy = token_logprobs(
            head, here, targets, temperature=1.0, logits_at_once=at_once * VOCABULARY, wants_entropy=wants_entropy
        )
        assert (entropy is not None) == wants_entropy
        (logprobs * upstream).sum().backward()
        return torch.cat([logprobs.detach(), here.grad.flatten()])

    assert torch.equal(outcome(False), outcome(True))


def test_of_the_logits_one_tensor_is_kept_for_the_gradient(task):
    head, hidden, targets, _ = task
    kept = []

    def keep(tensor):
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(head, hidden, targets, temperature=0.7, wants_entropy=True)
    assert kept.count((TOKENS, VOCABULARY)) == 1


def test_a_target_whose_probability_is_rounded_to_0_has_a_logprob_and_a_gradient():
    head, hidden = torch.nn.Identity(), torch.tensor([[0.0, 200.0, 1.0]], requires_grad=True)
    head.out_features = 3
    logprobs, entropy = token_logprobs(head, hidden, torch.tensor([0]), temperature=1.0, wants_entropy=True)
    (logprobs + entropy).sum().backward()
    assert (logprobs.item(), entropy.item()) == (-200.0, 0.0)
    assert hidden.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_logits_in_bfloat16_have_logprobs_in_float32_and_a_gradient_in_bfloat16(task):
    head, hidden, targets, upstream = task
    rounded = head.to(torch.bfloat16)(hidden.to(torch.bfloat16)).detach()
    identity = torch.nn.Identity()
    identity.out_features = VOCABULARY
    found = []
    for way, dtype in ((token_logprobs, torch.bfloat16), (plain, torch.float32)):
        here = rounded.clone().to(dtype).requires_grad_()
        asked = {"temperature": 0.7} | ({} if way is plain else {"wants_entropy": True})
        logprobs, entropy = way(identity, here, targets, **asked)
        (logprobs * upstream).sum().backward()
        found.append((logprobs.detach(), entropy.detach(), here.grad.to(torch.bfloat16)))
        assert here.grad.dtype == dtype
    for ours, expected in zip(*found, strict=True):
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
    logprobs, entropy = token_logprobs(head, hidden[:0], targets[:0], temperature=1.0, wants_entropy=True)
    assert len(logprobs) == len(entropy) == 0
