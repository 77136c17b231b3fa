"""Capped scores and logits, in everything that computes them, against formulas in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from tests.kernels.implementations import load_implementations
from tests.kernels.test_attention import document_mask, inputs
from tests.kernels.test_cross_entropy import INNER
from tests.kernels.test_cross_entropy import inputs as logit_inputs
from trainer.kernels.choose import PARTIAL_ATTENTION
from trainer.kernels.cross_entropy.reference import linear_cross_entropy
from trainer.kernels.divergence.reference import (
    forward_kl,
    linear_divergence,
    linear_sparse_divergence,
)
from trainer.kernels.log_probs.reference import (
    linear_class_log_probs,
    linear_log_probs,
    linear_top_k,
)
from trainer.kernels.ragged.lengths import SampleLengths
from trainer.kernels.rms_norm.reference import rms_norm, zero_centered_rms_norm
from trainer.kernels.softcap import softcap, softcap_slope
from trainer.kernels.swiglu.reference import geglu

ATTENTION = load_implementations("attention")
CAP, TEMPERATURE = 0.8, 1.7
IGNORED = -100


def capped(x, cap=CAP):
    return cap * torch.tanh(x / cap)


def formula(query, key, value, seen, sinks=None):
    """Attention over all keys at once; `seen` is [B or 1, 1, S, L]."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(repeats, 2) for x in (key, value))
    scores = capped(torch.einsum("bshk,blhk->bhsl", query, key) / query.shape[-1] ** 0.5)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : key.shape[1]]
    return torch.einsum("bhsl,blhw->bshw", weights, value)


def assert_same(found, expected, leaves):
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, direction),
        torch.autograd.grad(expected, leaves, direction),
    )


def causal(queries, keys):
    return torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reach", [None, 5, 70])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (7, 7), (130, 131)])
def test_attention_in_windows_and_documents(name, masked, reach, sunk, queries, keys):
    q, k, v = leaves = inputs(2, queries, keys, 4, 2, 6, value_width=5)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if sunk else None
    mask = document_mask(2, queries, keys) if masked else None
    seen = causal(queries, keys)
    seen = seen if reach is None else seen.triu(keys - queries - reach + 1)
    expected = formula(q, k, v, seen if mask is None else seen & mask, sinks)
    found = ATTENTION[name](q, k, v, mask, window=reach, sinks=sinks, softcap=CAP)
    assert_same(found, expected, [*leaves, *([sinks] if sunk else [])])


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_a_flat_row_and_in_both_directions(name, is_causal):
    lengths = [3, 8, 1, 8]
    total = sum(lengths)
    q, k, v = leaves = inputs(1, total, total, 4, 2, 6)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (ids.unsqueeze(1) == ids)[None, None]
    seen = seen & causal(total, total) if is_causal else seen
    samples = SampleLengths(lengths)
    attend = ATTENTION[name]
    found = attend(q, k, v, samples, causal=is_causal, softcap=CAP)
    assert_same(found, formula(q, k, v, seen), leaves)
    if not is_causal:
        found = attend(q, k, v, seen, causal=False, softcap=CAP)
        assert_same(found, formula(q, k, v, seen), leaves)


@pytest.mark.parametrize("name", PARTIAL_ATTENTION)
@torch.no_grad()
def test_parts_of_the_keys_make_the_whole(name):
    q, k, v = inputs(2, 9, 9, 4, 2, 6)
    with torch.enable_grad():
        expected = formula(q, k, v, torch.ones(1, 1, 9, 9, dtype=torch.bool))
        direction = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, (q, k, v), direction)
    kernel, cuts = PARTIAL_ATTENTION[name], ((0, 4), (4, 9))
    parts = [kernel.forward(q, k[:, a:b], v[:, a:b], None, False, CAP) for a, b in cuts]
    total = torch.stack([sums for _, sums in parts]).logsumexp(0)
    shares = [(sums - total).exp().transpose(1, 2).unsqueeze(-1) for _, sums in parts]
    out = sum(share * each for share, (each, _) in zip(shares, parts, strict=True))
    torch.testing.assert_close(out, expected)
    found = [
        kernel.backward(direction, q, k[:, a:b], v[:, a:b], out, total, None, False, CAP)
        for a, b in cuts
    ]
    torch.testing.assert_close(sum(each[0] for each in found), wanted[0])
    for place in (1, 2):
        torch.testing.assert_close(torch.cat([x[place] for x in found], 1), wanted[place])


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("z_loss", [0.0, 0.5])
def test_cross_entropy(inner, chunk, z_loss):
    hidden, weight, labels = logit_inputs()
    logits = capped(hidden @ weight.T)
    each = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
    penalty = z_loss * logits.logsumexp(-1).square() * (labels != IGNORED)
    options = {"chunk": chunk, "inner": inner, "z_loss": z_loss, "softcap": CAP}
    told = []
    found = linear_cross_entropy(hidden, weight, labels, token_losses=told, **options)
    torch.testing.assert_close(torch.cat(told), each.detach())
    with torch.no_grad():
        alone = linear_cross_entropy(hidden, weight, labels, **options)
    torch.testing.assert_close(alone, found.detach())
    assert_same(found, (each + penalty).sum(), (hidden, weight))


def test_log_probs_of_labels_and_classes():
    hidden, weight, labels = logit_inputs()
    log_probs = capped(hidden @ weight.T).log_softmax(-1)
    chosen = log_probs.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    found = linear_log_probs(hidden, weight, labels, chunk=5, softcap=CAP)
    assert_same(found, chosen * (labels != IGNORED), (hidden, weight))
    cooled = (capped(hidden @ weight.T) / TEMPERATURE).log_softmax(-1)
    classes = torch.stack([torch.randperm(11)[:4] for _ in labels])
    options = {"temperature": TEMPERATURE, "chunk": 5, "softcap": CAP}
    known, rest = linear_class_log_probs(hidden, weight, classes, **options)
    others = cooled.exp().scatter(1, classes, 0).sum(1).log()
    expected = torch.cat((cooled.gather(1, classes), others.unsqueeze(1)), 1)
    assert_same(torch.cat((known, rest.unsqueeze(1)), 1), expected, (hidden, weight))
    values = linear_top_k(hidden, weight, 3, **options)[1]
    torch.testing.assert_close(values, cooled.topk(3).values.detach())


@pytest.mark.parametrize("caps", [(CAP, 1.3), (CAP, None), (None, CAP)])
def test_divergence_of_models_with_caps_of_their_own(caps):
    hidden, weight, labels = logit_inputs()
    teacher = torch.randn(23, 4, dtype=torch.float64), torch.randn(11, 4, dtype=torch.float64)
    counted = labels != IGNORED

    def of(states, matrix, cap):
        logits = states @ matrix.T
        return ((logits if cap is None else capped(logits, cap)) / TEMPERATURE).log_softmax(-1)

    p = of(*teacher, caps[1])

    def expected():
        return ((p.exp() * (p - of(hidden, weight, caps[0]))).sum(-1) * counted).sum()

    options = {"temperature": TEMPERATURE, "chunk": 5}
    student = hidden, weight
    found = linear_divergence(student, teacher, counted, forward_kl, softcaps=caps, **options)
    assert_same(found, expected(), student)
    values, classes = p.topk(11)
    sparse = linear_sparse_divergence(
        student, classes, values, counted, forward_kl, softcap=caps[0], **options
    )
    assert_same(sparse.sum(), expected(), student)


def test_the_slope_is_that_of_the_cap_and_none_where_a_score_is_masked():
    x = torch.linspace(-5, 5, 11, dtype=torch.float64, requires_grad=True)
    value = softcap(x, 2.0)
    (wanted,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(softcap_slope(value, 2.0), wanted)
    lowest = torch.tensor([torch.finfo(torch.float32).min / 4, float("-inf")])
    assert softcap_slope(lowest, 2.0).tolist() == [0.0, 0.0]


def test_geglu_and_its_gradients():
    gate, up = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    assert_same(geglu(gate, up), 0.5 * gate * (1 + inner.tanh()) * up, (gate, up))
    assert gradcheck(geglu, (gate, up))


def test_zero_centered_norms_round_once():
    x, weight = torch.randn(6, 32).bfloat16(), (torch.randn(32) * 1e-3).bfloat16()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())
    found = zero_centered_rms_norm(rms_norm, x, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last place, and a little for fp32's error.
    assert ((found.double() - expected).abs() <= expected.abs() * 2**-8 * 1.01).all()
