"""Chunked divergences of two models' outputs against torch's own over all logits in float64."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.distributed import run_ranks
from tests.kernels.largest import Largest
from trainer.engine.parallel.tensor.vocabulary import SplitVocabulary
from trainer.kernels.divergence import reference
from trainer.kernels.divergence.reference import (
    forward_kl,
    jensen_shannon,
    linear_divergence,
    linear_sparse_divergence,
    reverse_kl,
)
from trainer.kernels.log_probs.reference import linear_top_k

TOKENS, VOCAB = 23, 11
KINDS = {
    "forward": forward_kl,
    "reverse": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "skewed": partial(jensen_shannon, beta=0.1),
}


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(TOKENS, 6), (VOCAB, 6), (TOKENS, 4), (VOCAB, 4)]
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    for each in tensors[:2]:
        each.requires_grad_()
    counted = torch.rand(TOKENS) > 0.3
    return tensors[:2], tensors[2:], counted, torch.randn(TOKENS, dtype=torch.float64)


def formula(kind, student, teacher):
    """Divergence of two [T, V] log-probabilities by torch.nn.functional.kl_div."""

    def kl(a, b):
        return F.kl_div(b, a, log_target=True, reduction="none").sum(-1)

    if kind == "forward":
        return kl(teacher, student)
    if kind == "reverse":
        return kl(student, teacher)
    beta = 0.5 if kind == "jensen_shannon" else 0.1
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def dense(kind, student, teacher, counted, temperature):
    logs = [(h @ w.T / temperature).log_softmax(-1) for h, w in (student, teacher)]
    return formula(kind, *logs) * counted


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_torchs_on_all_logits(kind, temperature):
    student, teacher, counted, _ = inputs()
    rows = []
    options = {"temperature": temperature, "chunk": 5, "token_losses": rows}
    found = linear_divergence(student, teacher, counted, KINDS[kind], **options)
    expected = dense(kind, student, teacher, counted, temperature)
    torch.testing.assert_close(torch.cat(rows), expected.detach())
    torch.testing.assert_close(found, expected.sum())
    torch.testing.assert_close(
        torch.autograd.grad(found * 0.37, student),
        torch.autograd.grad(expected.sum() * 0.37, student),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_is_close_for_distributions_far_apart(kind):
    student, teacher, counted, _ = inputs(torch.float32)
    with torch.no_grad():
        student[0].mul_(5), teacher[0].mul_(5)
    found = linear_divergence(student, teacher, counted, KINDS[kind], chunk=5)
    exact = [each.detach().double().requires_grad_() for each in student]
    expected = dense(kind, exact, [each.double() for each in teacher], counted, 1.0).sum()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    grads = torch.autograd.grad(found, student)
    # Logits near 30 have 2e-6 of rounding error in fp32, and probabilities as much relative error.
    for mine, other in zip(grads, torch.autograd.grad(expected, exact), strict=True):
        assert (mine - other).norm() < 1e-4 * other.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_sparse_teacher_all_other_classes_count_as_one(kind):
    student, teacher, counted, upstream = inputs()
    classes, log_probs = linear_top_k(*teacher, 3, temperature=2)
    found = linear_sparse_divergence(
        student, classes, log_probs, counted, KINDS[kind], temperature=2, chunk=5
    )
    full = [(h @ w.T / 2).softmax(-1) for h, w in (student, teacher)]
    known = [probabilities.gather(1, classes) for probabilities in full]
    merged = [torch.cat([p, 1 - p.sum(1, keepdim=True)], 1).log() for p in known]
    expected = formula(kind, *merged) * counted
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, student, upstream),
        torch.autograd.grad(expected, student, upstream),
    )
    # Merging classes never makes a divergence larger.
    assert (found <= dense(kind, student, teacher, counted, 2) + 1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_teacher_of_all_classes_is_the_dense_one(kind):
    student, teacher, counted, upstream = inputs()
    classes, log_probs = linear_top_k(*teacher, VOCAB)
    # A row may have fewer classes than others; what fills it up says nothing.
    classes = F.pad(classes, (0, 2), value=-100)
    log_probs = F.pad(log_probs, (0, 2), value=-torch.inf)
    found = linear_sparse_divergence(student, classes, log_probs, counted, KINDS[kind])
    expected = dense(kind, student, teacher, counted, 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, student, upstream),
        torch.autograd.grad(expected, student, upstream),
    )


def test_equal_models_have_no_divergence_and_no_gradient():
    student, _, counted, _ = inputs()
    for divergence in KINDS.values():
        teacher = [each.detach().clone() for each in student]
        found = linear_divergence(student, teacher, counted, divergence)
        torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-12, rtol=0)
        for grad in torch.autograd.grad(found, student):
            torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-12, rtol=0)


def test_without_gradients_no_gradient_work_is_done(monkeypatch):
    student, teacher, counted, _ = inputs()
    monkeypatch.setattr(reference, "add_product", lambda *_: pytest.fail("gradient work"))
    with torch.no_grad():
        found = linear_divergence(student, teacher, counted, forward_kl, chunk=4)
    torch.testing.assert_close(found, dense("forward", student, teacher, counted, 1).sum())
    assert not found.requires_grad


def test_all_logits_are_never_held():
    student = [torch.randn(512, 8, requires_grad=True), torch.randn(4096, 8).requires_grad_()]
    teacher = [torch.randn(512, 4), torch.randn(4096, 4)]
    with Largest() as largest:
        linear_divergence(
            student, teacher, torch.ones(512, dtype=torch.bool), jensen_shannon, chunk=64
        ).backward()
    assert largest.elements == 64 * 4096


def test_ranks_that_share_the_vocabulary_get_the_whole_ones_values_and_gradients():
    student, teacher, counted, _ = inputs()
    ranks = run_ranks(2, compute_shares, timeout=60)
    for kind in KINDS:
        expected = dense(kind, student, teacher, counted, 2.0).sum()
        grads = torch.autograd.grad(expected, student)
        found = [[torch.from_numpy(each) for each in rank[kind]] for rank in ranks]
        for values, _, _ in found:
            torch.testing.assert_close(values, expected.detach())
        torch.testing.assert_close(found[0][1] + found[1][1], grads[0])
        torch.testing.assert_close(torch.cat([found[0][2], found[1][2]]), grads[1])


def compute_shares():
    (hidden, weight), (teacher_hidden, teacher_weight), counted, _ = inputs()
    half = -(-VOCAB // 2)
    first = dist.get_rank() * half
    part = slice(first, first + half)
    share = weight.detach()[part].requires_grad_()
    shard = SplitVocabulary(first, dist.group.WORLD)
    results = {}
    for kind, divergence in KINDS.items():
        found = linear_divergence(
            (hidden, share),
            (teacher_hidden, teacher_weight[part]),
            counted,
            divergence,
            temperature=2.0,
            shard=shard,
            chunk=6,
        )
        grads = torch.autograd.grad(found, (hidden, share))
        results[kind] = [each.detach().numpy() for each in (found, *grads)]
    return results
