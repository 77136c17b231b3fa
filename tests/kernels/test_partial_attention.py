"""Every implementation of partial attention against softmax over all keys in float64."""

from itertools import pairwise

import pytest
import torch

from tests.kernels.test_attention import formula, inputs
from trainer.kernels.attention import partial_sdpa
from trainer.kernels.attention.partial import wide_dtype
from trainer.kernels.choose import PARTIAL_ATTENTION


def parts(name, q, k, v, mask, causal, cuts):
    """Attend to the keys between cuts, one part after another, and merge."""
    outs, sums = [], []
    for first, last in pairwise(cuts):
        seen = None if mask is None else mask[..., first:last]
        found, lse = PARTIAL_ATTENTION[name].forward(
            q, k[:, first:last], v[:, first:last], seen, causal
        )
        assert found.dtype == q.dtype
        assert lse.dtype == wide_dtype(q.dtype)
        outs.append(found)
        sums.append(lse)
    total = torch.stack(sums).logsumexp(0)
    shares = [(lse - total).exp().transpose(1, 2).unsqueeze(-1) for lse in sums]
    out = sum(share * found for share, found in zip(shares, outs, strict=True))
    return out.to(q.dtype), total


def gradients(name, grad, q, k, v, out, total, mask, causal, cuts):
    """Return the gradients that the parts give together."""
    dq, dk, dv = torch.zeros_like(q), [], []
    for first, last in pairwise(cuts):
        seen = None if mask is None else mask[..., first:last]
        found = PARTIAL_ATTENTION[name].backward(
            grad, q, k[:, first:last], v[:, first:last], out, total, seen, causal
        )
        dq += found[0]
        dk.append(found[1])
        dv.append(found[2])
    return dq, torch.cat(dk, 1), torch.cat(dv, 1)


def some_mask(queries, keys):
    """Return a mask in which each query sees a key at least, often none of some part."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(2, 1, queries, keys, generator=generator) < 0.2
    return mask | (torch.arange(keys) == torch.arange(queries).unsqueeze(1) % keys)


CASES = [
    # queries, keys, heads, groups, width, cuts
    (1, 1, 1, 1, 2, (0, 1)),
    (5, 7, 4, 2, 6, (0, 3, 7)),
    (3, 9, 3, 1, 8, (0, 1, 2, 9)),
    (66, 130, 2, 2, 4, (0, 64, 130)),
]


@pytest.mark.parametrize("name", PARTIAL_ATTENTION)
@pytest.mark.parametrize(("queries", "keys", "heads", "groups", "width", "cuts"), CASES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("narrower", [0, 1])
@torch.no_grad()
def test_parts_make_the_whole(name, masked, narrower, queries, keys, heads, groups, width, cuts):
    q, k, v = inputs(2, queries, keys, heads, groups, width, value_width=width - narrower)
    mask = some_mask(queries, keys) if masked else None
    everything = torch.ones(2, 1, queries, keys, dtype=torch.bool)
    with torch.enable_grad():
        expected = formula(q, k, v, mask if masked else everything)
        direction = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, (q, k, v), direction)
    out, total = parts(name, q, k, v, mask, False, cuts)
    torch.testing.assert_close(out, expected)
    found = gradients(name, direction, q, k, v, out, total, mask, False, cuts)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", PARTIAL_ATTENTION)
@pytest.mark.parametrize("length", [1, 5, 70, 600])
@torch.no_grad()
def test_causal_parts_stop_at_the_query(name, length):
    q, k, v = inputs(1, length, length, 3, 1, 2)
    with torch.enable_grad():
        expected = formula(q, k, v)
        direction = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, (q, k, v), direction)
    out, total = parts(name, q, k, v, None, True, (0, length))
    torch.testing.assert_close(out, expected)
    found = gradients(name, direction, q, k, v, out, total, None, True, (0, length))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", PARTIAL_ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_query_that_sees_no_key_has_no_weight(name, dtype):
    q, k, v = inputs(1, 4, 6, 2, 1, 8, dtype)
    mask = torch.ones(1, 1, 4, 6, dtype=torch.bool)
    mask[:, :, 2] = False
    out, lse = PARTIAL_ATTENTION[name].forward(q, k, v, mask, False)
    assert out.isfinite().all()
    assert (lse[:, :, 2] < -1e4).all()
    elsewhere = torch.zeros_like(lse)  # other keys give the query's output
    out[:, 2] = 1
    found = PARTIAL_ATTENTION[name].backward(
        torch.ones_like(out), q, k, v, out, lse.where(lse > -1e4, elsewhere), mask, False
    )
    assert all(each.isfinite().all() for each in found)
    assert not found[0][:, 2].any()
    mask[:, :, [0, 1, 3]] = False
    found = PARTIAL_ATTENTION[name].backward(
        torch.ones_like(out), q, k, v, out, elsewhere, mask, False
    )
    assert not any(each.any() for each in found)


@pytest.mark.parametrize("name", PARTIAL_ATTENTION)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@torch.no_grad()
def test_low_precision_is_close_to_float64(name, masked, dtype, tolerance):
    q, k, v = inputs(2, 70, 70, 4, 2, 8, dtype)
    mask = some_mask(70, 70) if masked else torch.ones(2, 1, 70, 70, dtype=torch.bool)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        expected = formula(*exact, mask)
        direction = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, exact, direction)
    cuts = (0, 30, 70)
    out, total = parts(name, q, k, v, mask if masked else None, False, cuts)
    found = gradients(
        name, direction.to(dtype), q, k, v, out, total, mask if masked else None, False, cuts
    )
    for got, exactly in zip((out, *found), (expected, *wanted), strict=True):
        assert (got - exactly).norm() < tolerance * exactly.norm()


@pytest.mark.parametrize("kernel", [partial_sdpa._flash, partial_sdpa._efficient])
@pytest.mark.parametrize("groups", [1, 4])
def test_the_kernels_of_gpus_take_what_they_are_given(kernel, groups):
    """Of tensors without content, torch checks the arguments and says the shapes."""
    q, grad = (torch.empty(2, 4, 5, 8, dtype=torch.bfloat16, device="meta") for _ in range(2))
    k, v = (torch.empty(2, groups, 7, 8, dtype=q.dtype, device="meta") for _ in range(2))
    mask = None
    if kernel is partial_sdpa._efficient:
        mask = torch.empty(2, 1, 5, 7, dtype=torch.bool, device="meta")
        bias = partial_sdpa._aligned_bias(mask, q)
        assert bias.shape == (2, 4, 5, 7)
        assert bias.stride()[1:] == (0, 8, 1)
    out, lse = kernel.forward(q, k, v, mask, False)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 5), torch.float32)
    found = kernel.backward(grad, q, k, v, out, lse, mask, False)
    assert [each.shape for each in found] == [q.shape, k.shape, k.shape]
