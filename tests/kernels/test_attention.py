"""Every implementation of attention against the formula in float64, a query at a time."""

import pytest
import torch
from torch.autograd import gradcheck

from tests.kernels.implementations import load_implementations

ATTENTION = load_implementations("attention")


def formula(query, key, value, mask=None):
    """softmax(q k / sqrt(K)) v for each query on its own (arXiv:1706.03762, equation 1)."""
    batch, queries, heads, width = query.shape
    keys, repeats = key.shape[1], heads // key.shape[2]
    out = query.new_empty(batch, queries, heads, value.shape[-1])
    for b in range(batch):
        for s in range(queries):
            for h in range(heads):
                if mask is None:
                    seen = list(range(keys - queries + s + 1))
                else:
                    seen = mask[b, 0, s].nonzero().flatten().tolist()
                k, v = key[b, seen, h // repeats], value[b, seen, h // repeats]
                out[b, s, h] = (k @ query[b, s, h] / width**0.5).softmax(0) @ v
    return out


def inputs(batch, queries, keys, heads, groups, width, dtype=torch.float64, value_width=None):
    torch.manual_seed(queries * 100 + keys)
    q = torch.randn(batch, queries, heads, width, dtype=torch.float64)
    k = torch.randn(batch, keys, groups, width, dtype=torch.float64)
    v = torch.randn(batch, keys, groups, value_width or width, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def document_mask(batch, queries, keys):
    documents = torch.randint(0, 3, (batch, keys), generator=torch.Generator().manual_seed(1))
    own = documents[:, keys - queries :]
    same = own.unsqueeze(2) == documents.unsqueeze(1)
    return (same & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)).unsqueeze(1)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "groups", "width"),
    [
        (1, 1, 1, 1, 2),
        (7, 7, 4, 2, 6),
        (1, 9, 4, 1, 4),
        (5, 12, 6, 3, 2),
        (65, 65, 2, 1, 4),
        (130, 131, 2, 2, 2),
    ],
)
def test_outputs_and_gradients_equal_the_formula(name, masked, queries, keys, heads, groups, width):
    q, k, v = inputs(2, queries, keys, heads, groups, width)
    mask = document_mask(2, queries, keys) if masked else None
    out = ATTENTION[name](q, k, v, mask)
    expected = formula(q, k, v, mask)
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), direction),
        torch.autograd.grad(expected, (q, k, v), direction),
    )


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("masked", [False, True])
def test_values_may_be_narrower_than_keys(name, masked):
    q, k, v = inputs(2, 70, 75, 4, 2, 12, value_width=8)
    mask = document_mask(2, 70, 75) if masked else None
    out = ATTENTION[name](q, k, v, mask)
    expected = formula(q, k, v, mask)
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), direction),
        torch.autograd.grad(expected, (q, k, v), direction),
    )


@pytest.mark.parametrize("name", ATTENTION)
def test_gradients_equal_finite_differences(name):
    assert gradcheck(ATTENTION[name], inputs(1, 3, 4, 2, 1, 2))


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_low_precision_is_close_to_float64_and_keeps_its_dtype(name, dtype, tolerance):
    q, k, v = inputs(2, 70, 70, 4, 2, 8, dtype)
    out = ATTENTION[name](q, k, v)
    assert out.dtype == dtype
    expected = formula(q.double(), k.double(), v.double())
    assert (out - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("name", ATTENTION)
def test_nothing_flows_from_later_positions(name):
    q, k, v = inputs(1, 100, 100, 2, 1, 4)
    grads = torch.autograd.grad(ATTENTION[name](q, k, v)[:, :40].sum(), (q, k, v))
    for grad in grads:
        assert grad[:, :40].abs().sum() > 0
        assert torch.equal(grad[:, 40:], torch.zeros_like(grad[:, 40:]))
