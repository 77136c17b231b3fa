"""Conditional vector-matrix products against a loop over rows."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.kernels.guarded import relative_error
from trainer.kernels.cvmm.op import cvmm, cvmm_prepare_sel, cvmm_prepare_sel2
from trainer.kernels.quantize.reference import dequant, dequant_act, quant_act, quant_weight

EXPERTS, INNER, OUTER = 4, 5, 3


def inputs(*shape):
    torch.manual_seed(0)
    x = torch.randn(*shape, INNER, dtype=torch.float64, requires_grad=True)
    keys = torch.randn(EXPERTS, INNER, OUTER, dtype=torch.float64, requires_grad=True)
    return x, keys


def test_each_row_meets_the_matrix_that_it_selected():
    x, keys = inputs(2, 6)
    sel = torch.randint(0, EXPERTS, (2, 6))
    expected = torch.stack([
        torch.stack([x[b, s] @ keys[sel[b, s]] for s in range(6)]) for b in range(2)
    ])  # fmt: skip
    torch.testing.assert_close(cvmm(x, sel, keys), expected)
    torch.testing.assert_close(cvmm(x, cvmm_prepare_sel(sel, EXPERTS), keys), expected)


def test_a_row_can_select_several_and_weigh_them():
    x, keys = inputs(2, 6)
    sel, w = torch.randint(0, EXPERTS, (2, 6, 2)), torch.rand(2, 6, 2, dtype=torch.float64)
    expected = torch.empty(2, 6, 2, OUTER, dtype=torch.float64)
    for b, s, a in torch.cartesian_prod(*map(torch.arange, (2, 6, 2))).tolist():
        expected[b, s, a] = (x[b, s] @ keys[sel[b, s, a]]).detach()
    torch.testing.assert_close(cvmm(x, cvmm_prepare_sel2(sel), keys).detach(), expected)
    summed = (expected * w.unsqueeze(-1)).sum(-2)
    torch.testing.assert_close(cvmm(x, cvmm_prepare_sel2(sel, w), keys).detach(), summed)


def test_up_and_down_again_is_a_feed_forward_layer_of_experts():
    """The way back has a row for each selection (SigmaMoE, arXiv:2310.10837, equation 16)."""
    x, keys = inputs(6)
    values = torch.randn(EXPERTS, OUTER, INNER, dtype=torch.float64)
    sel, w = torch.randint(0, EXPERTS, (6, 2)), torch.rand(6, 2, dtype=torch.float64)
    hidden = cvmm(x, cvmm_prepare_sel2(sel), keys).relu()
    out = cvmm(hidden, cvmm_prepare_sel2(sel, w), values)
    for token in range(6):
        one = sum(
            w[token, a] * ((x[token] @ keys[e]).relu() @ values[e])
            for a, e in enumerate(sel[token].tolist())
        )
        torch.testing.assert_close(out[token], one)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_gradients(check):
    x, keys = inputs(3)
    sel = torch.tensor([[0, 2], [2, 2], [3, 0]])
    w = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert check(lambda x, keys: cvmm(x, sel[:, 0], keys), (x, keys))
    assert check(lambda x, keys, w: cvmm(x, cvmm_prepare_sel2(sel, w), keys), (x, keys, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ["bf16", "fp8"])
def test_it_compiles_as_one_graph(act, dtype):
    x, sel, w, keys = in_blocks(dtype=dtype)

    def layer(x, w, keys):
        return cvmm(x, cvmm_prepare_sel2(sel, w), keys, act=act)

    found = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        out = function(x, w, keys)
        found.append((out, *torch.autograd.grad(out.square().sum(), (x, w, keys))))
    torch.testing.assert_close(*found)


def in_blocks(inner=256, outer=128, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(9, inner, dtype=dtype, requires_grad=True)
    keys = (torch.randn(EXPERTS, inner, outer, dtype=dtype) / inner**0.5).requires_grad_()
    sel = torch.tensor([[0, 2], [2, 3], [3, 0]] * 3)  # nobody selects 1
    return x, sel, torch.rand(9, 2, dtype=dtype, requires_grad=True), keys


def rounded_rows(x):
    return dequant_act(*quant_act(x.detach().float()), torch.float64)


def rounded_keys(keys):
    q, scale = quant_weight(keys.detach().float())
    return torch.stack([dequant(*each, torch.float64) for each in zip(q, scale, strict=True)])


def test_fp8_products_are_those_of_the_rounded_numbers():
    x, sel, w, keys = in_blocks()
    expected = torch.einsum("tk,takn->tan", rounded_rows(x), rounded_keys(keys)[sel])
    each = cvmm(x, cvmm_prepare_sel2(sel), keys, act="fp8").detach()
    assert relative_error(each, expected) < 1e-6
    one = cvmm(x, sel[:, 1], keys, act="fp8").detach()
    assert relative_error(one, expected[:, 1]) < 1e-6
    summed = cvmm(x, cvmm_prepare_sel2(sel, w), keys, act="fp8").detach()
    assert relative_error(summed, (expected * w.detach().unsqueeze(-1)).sum(1)) < 1e-6


def test_fp8_gradients_of_rows_are_rounded_and_those_of_keys_are_not():
    x, sel, w, keys = in_blocks()
    grad = torch.randn(9, 128)
    out = cvmm(x, cvmm_prepare_sel2(sel, w), keys, act="fp8")
    grads = torch.autograd.grad(out, (x, w, keys), grad)
    # Each product has the row's gradient times its weight, and that is what is quantised.
    of_products = (grad.unsqueeze(1) * w.detach().unsqueeze(-1)).flatten(0, 1)
    of_rows = torch.einsum(
        "tan,takn->tk", rounded_rows(of_products).view(9, 2, 128), rounded_keys(keys)[sel]
    )
    products = torch.einsum("tk,takn->tan", rounded_rows(x), rounded_keys(keys)[sel])
    of_weights = (products * grad.double().unsqueeze(1)).sum(-1)
    of_keys = torch.zeros(keys.shape, dtype=torch.float64)
    outer = torch.einsum("tk,tan->takn", x.detach().double(), of_products.view(9, 2, 128).double())
    of_keys.index_add_(0, sel.flatten(), outer.flatten(0, 1))
    for found, expected in zip(grads, (of_rows, of_weights, of_keys), strict=True):
        assert relative_error(found, expected) < 1e-6


def test_fp8_is_close_to_the_plain_product_and_keeps_its_dtype():
    x, sel, w, keys = in_blocks(dtype=torch.bfloat16)
    found = []
    for act in ("fp8", "bf16"):
        out = cvmm(x, cvmm_prepare_sel2(sel, w), keys, act=act)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), (x, w, keys))))
    for fp8, plain in zip(*found, strict=True):
        assert fp8.dtype == torch.bfloat16
        assert 1e-3 < relative_error(fp8, plain) < 0.06


def test_what_fp8_cannot_multiply_is_refused():
    x, sel, _, keys = in_blocks(256, 96)
    with pytest.raises(ValueError, match=r"keys of 256 x 96 in fp8.*act='bf16'"):
        cvmm(x, sel[:, 0], keys, act="fp8")
    assert cvmm(x, sel[:, 0], keys).shape == (9, 96)
    with pytest.raises(ValueError, match="act is 'int8'; known: bf16, fp8"):
        cvmm(x, sel[:, 0], keys, act="int8")
