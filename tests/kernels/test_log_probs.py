"""Chunked log-probabilities of chosen classes against log_softmax of all logits in float64."""

import pytest
import torch
import torch.distributed as dist
from torch.autograd import gradcheck

from tests.distributed import run_ranks
from tests.kernels.largest import Largest
from trainer.engine.parallel.tensor.vocabulary import SplitVocabulary
from trainer.kernels.log_probs.reference import (
    linear_class_log_probs,
    linear_log_probs,
    linear_top_k,
)

IGNORED = -100
TOKENS, WIDTH, VOCAB = 23, 6, 11


def inputs(dtype=torch.float64, scale=1.0):
    torch.manual_seed(0)
    hidden = (torch.randn(TOKENS, WIDTH, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,))
    labels[torch.rand(TOKENS) < 0.3] = IGNORED
    classes = torch.stack([torch.randperm(VOCAB)[:4] for _ in range(TOKENS)])
    classes[3, 2:] = IGNORED
    classes[5] = IGNORED
    upstream = torch.randn(TOKENS, 5, dtype=torch.float64)
    return hidden.requires_grad_(), weight.requires_grad_(), labels, classes, upstream


def formula(hidden, weight, labels):
    log_probs = (hidden @ weight.T).log_softmax(-1)
    return log_probs.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1) * (labels != IGNORED)


def class_formula(hidden, weight, classes, temperature):
    log_probs = (hidden @ weight.T / temperature).log_softmax(-1)
    known = log_probs.gather(1, classes.clamp(min=0)) * (classes != IGNORED)
    is_known = (torch.arange(VOCAB) == classes.unsqueeze(2)).any(1)
    rest = (log_probs.exp() * ~is_known).sum(1).log()
    return known, rest


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_each_rows_gradient_follows_its_own_weight(chunk):
    hidden, weight, labels, _, upstream = inputs()
    found = linear_log_probs(hidden, weight, labels, chunk=chunk)
    expected = formula(hidden, weight, labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, (hidden, weight), upstream[:, 0]),
        torch.autograd.grad(expected, (hidden, weight), upstream[:, 0]),
    )


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_classes_and_the_rest_have_the_values_and_gradients_of_the_formula(temperature):
    hidden, weight, _, classes, upstream = inputs()
    found = linear_class_log_probs(hidden, weight, classes, temperature=temperature, chunk=5)
    expected = class_formula(hidden, weight, classes, temperature)
    torch.testing.assert_close(found, expected)
    weights = (upstream[:, :4], upstream[:, 4])
    torch.testing.assert_close(
        torch.autograd.grad(found, (hidden, weight), weights),
        torch.autograd.grad(expected, (hidden, weight), weights),
    )


def test_gradients_equal_finite_differences():
    hidden, weight, labels, _, _ = inputs()
    hidden, weight = hidden[:5].detach().requires_grad_(), weight[:4].detach().requires_grad_()
    labels = torch.tensor([0, 3, IGNORED, 1, 2])
    assert gradcheck(lambda h, w: linear_log_probs(h, w, labels, chunk=2), (hidden, weight))


def test_a_certain_model_keeps_an_accurate_rest():
    # 1 minus the sum of the known probabilities would be 0 or rounding error in fp32.
    hidden, weight = torch.tensor([[30.0]]), torch.tensor([[1.0], [0.0], [0.0]])
    known, rest = linear_class_log_probs(hidden, weight, torch.tensor([[0]]))
    exact = class_formula_of(hidden.double(), weight.double())
    torch.testing.assert_close(rest.double(), exact, rtol=1e-6, atol=0)
    assert known.item() == pytest.approx(0, abs=1e-6)


def class_formula_of(hidden, weight):
    return (hidden @ weight.T).log_softmax(-1)[:, 1:].logsumexp(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_low_precision_keeps_dtypes_and_is_close(dtype, tolerance):
    hidden, weight, labels, _, upstream = inputs(dtype, scale=0.3)
    found = linear_log_probs(hidden, weight, labels, chunk=4)
    assert found.dtype == torch.float32
    found.backward(upstream[:, 0].float())
    assert (hidden.grad.dtype, weight.grad.dtype) == (dtype, dtype)
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    expected = formula(*exact, labels)
    expected.backward(upstream[:, 0])
    assert (found - expected).norm() < tolerance * expected.norm()
    for mine, other in zip((hidden, weight), exact, strict=True):
        assert (mine.grad - other.grad).norm() < tolerance * other.grad.norm()


def test_the_likeliest_classes_are_torchs_top_k():
    hidden, weight, _, _, _ = inputs()
    expected = (hidden @ weight.T / 2).log_softmax(-1).topk(3)
    classes, log_probs = linear_top_k(hidden, weight, 3, temperature=2, chunk=7)
    torch.testing.assert_close((log_probs, classes), tuple(each.detach() for each in expected))


def test_all_logits_are_never_held():
    hidden, weight = torch.randn(512, 8, requires_grad=True), torch.randn(4096, 8).requires_grad_()
    labels = torch.randint(0, 4096, (512,))
    with Largest() as largest:
        linear_log_probs(hidden, weight, labels, chunk=64).sum().backward()
        linear_top_k(hidden, weight, 4, chunk=64)
    assert largest.elements == 64 * 4096


def test_ranks_that_share_the_vocabulary_get_the_whole_ones_values_and_gradients():
    hidden, weight, labels, classes, upstream = inputs()
    log_probs = formula(hidden, weight, labels)
    known, rest = class_formula(hidden, weight, classes, 1.5)
    total = (log_probs * upstream[:, 0]).sum() + (known * upstream[:, :4]).sum()
    grads = torch.autograd.grad(total + (rest * upstream[:, 4]).sum(), (hidden, weight))
    top = [each.detach() for each in (hidden @ weight.T).log_softmax(-1).topk(8)]
    ranks = [
        [torch.from_numpy(each) for each in rank]
        for rank in run_ranks(2, compute_share, timeout=60)
    ]
    for found in ranks:
        torch.testing.assert_close(found[0], log_probs.detach())
        torch.testing.assert_close(found[1:3], [known.detach(), rest.detach()])
        torch.testing.assert_close(found[5:], top)
    # Each rank has its own classes' part of the hidden states' gradient.
    torch.testing.assert_close(ranks[0][3] + ranks[1][3], grads[0])
    torch.testing.assert_close(torch.cat([ranks[0][4], ranks[1][4]]), grads[1])


def compute_share():
    hidden, weight, labels, classes, upstream = inputs()
    half = -(-VOCAB // 2)
    first = dist.get_rank() * half
    share = weight.detach()[first : first + half].requires_grad_()
    shard = SplitVocabulary(first, dist.group.WORLD)
    log_probs = linear_log_probs(hidden, share, labels, shard=shard, chunk=6)
    known, rest = linear_class_log_probs(
        hidden, share, classes, temperature=1.5, shard=shard, chunk=6
    )
    total = (log_probs * upstream[:, 0]).sum() + (known * upstream[:, :4]).sum()
    grads = torch.autograd.grad(total + (rest * upstream[:, 4]).sum(), (hidden, share))
    # Eight of eleven: more than a rank has.
    classes, values = linear_top_k(hidden, share, 8, shard=shard, chunk=6)
    found = (log_probs, known, rest, *grads, values, classes)
    return [each.detach().numpy() for each in found]
