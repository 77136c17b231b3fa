"""What holds for all inputs: hypothesis looks for those for which it does not."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.kernels.cvmm.op import cvmm, cvmm_prepare_sel2
from trainer.kernels.grouped_gemm_fp8 import op as fp8
from trainer.kernels.moe import op as moe
from trainer.kernels.permute.op import permute, unpermute
from trainer.kernels.quantize import reference as quantize
from trainer.kernels.routing.op import routing_plan

BLOCK = 128
seeds = st.integers(0, 2**31)
quickly = settings(deadline=None, max_examples=30)


@st.composite
def chosen(draw, most_tokens=12):
    """Return [T, A] choices of up to five experts, and how many there are."""
    experts, num_choices = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    tokens = draw(st.integers(0, most_tokens))
    flat = st.lists(
        st.integers(0, experts - 1), min_size=tokens * num_choices, max_size=tokens * num_choices
    )
    return torch.tensor(draw(flat), dtype=torch.int64).view(tokens, num_choices), experts


@quickly
@given(chosen(), seeds)
def test_rows_go_there_and_back(case, seed):
    sel, experts = case
    torch.manual_seed(seed)
    x, plan = torch.randn(len(sel), 3, dtype=torch.float64), routing_plan(sel, experts)
    slot = plan.slot.long()
    assert torch.equal(slot.flatten().sort().values, torch.arange(sel.numel()))
    tokens = torch.arange(len(sel)).unsqueeze(1).expand_as(sel)
    assert torch.equal(plan.row_token[slot].long(), tokens)  # one undoes the other
    rows = permute(x, plan.slot)
    assert torch.equal(rows, x[plan.row_token.long()])
    torch.testing.assert_close(unpermute(rows, plan.slot), sel.shape[1] * x)


@st.composite
def numbers(draw):
    """Return [M, K] of very different magnitudes, by rows and by blocks, with some zeros."""
    M, blocks = draw(st.integers(1, 20)), draw(st.integers(1, 3))
    torch.manual_seed(draw(seeds))
    x = torch.randn(M, blocks, BLOCK) * torch.randint(-20, 21, (M, blocks, 1)).float().exp2()
    x *= torch.rand(M, blocks, 1) > draw(st.sampled_from([0.0, 0.3]))
    x *= torch.rand(x.shape) > draw(st.sampled_from([0.0, 0.9]))
    return x.flatten(1).to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


@quickly
@given(numbers(), st.booleans())
def test_quantised_numbers_are_near_and_stay_what_they_are(x, pow2):
    q, scale = quantize.quant_act(x, pow2=pow2)
    restored = quantize.dequant_act(q, scale, torch.float32)
    largest = x.float().view(len(x), -1, BLOCK).abs().amax(2)
    error = (restored - x.float()).view(len(x), -1, BLOCK).abs().amax(2)
    assert (error <= largest * 2**-4).all()
    if pow2:
        assert (scale.frexp().mantissa == 0.5).all()
    again = quantize.dequant_act(*quantize.quant_act(restored, pow2=pow2), torch.float32)
    if pow2:
        assert torch.equal(again, restored)
    else:  # the scale is rounded once more
        torch.testing.assert_close(again, restored, rtol=1e-6, atol=0.0)


@quickly
@given(numbers())
def test_what_is_larger_by_a_power_of_two_has_the_same_bits(x):
    q, scale = quantize.quant_act(x.float(), pow2=True)
    more, larger = quantize.quant_act(8 * x.float(), pow2=True)
    live = scale > 2**-40  # blocks of zeros are taken to have a magnitude
    assert torch.equal(larger[live], 8 * scale[live])
    wide = live.T.repeat_interleave(BLOCK, 1)
    assert torch.equal(more.float()[wide], q.float()[wide])


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 3), seeds)
def test_fp8_products_are_those_of_what_the_numbers_stand_for(sizes, behind, seed):
    torch.manual_seed(seed)
    x, w = torch.randn(sum(sizes) + behind, 2 * BLOCK), torch.randn(len(sizes), BLOCK, 2 * BLOCK)
    (x8, x_scale), (w8, w_scale) = quantize.quant_act(x), quantize.quant_weight(w)
    offs = torch.tensor(sizes).cumsum(0).int()
    y = fp8.grouped_mm_fp8(x8, x_scale, w8, w_scale, offs, out_dtype=torch.float32)
    rows = quantize.dequant_act(x8, x_scale, torch.float64).split([*sizes, behind])
    weights = [quantize.dequant(*e, torch.float64) for e in zip(w8, w_scale, strict=True)]
    exact = [part @ weight.T for part, weight in zip(rows, weights, strict=False)]
    exact.append(torch.zeros(behind, BLOCK, dtype=torch.float64))
    torch.testing.assert_close(y.double(), torch.cat(exact), rtol=2e-3, atol=1e-4)


@quickly
@given(chosen(), seeds)
def test_each_row_meets_the_matrices_that_it_selected(case, seed):
    sel, experts = case
    torch.manual_seed(seed)
    x, keys = torch.randn(len(sel), 4).double(), torch.randn(experts, 4, 3).double()
    w = torch.rand(sel.shape).double()
    products = torch.einsum("tk,takn->tan", x, keys[sel])
    torch.testing.assert_close(cvmm(x, cvmm_prepare_sel2(sel), keys), products)
    summed = (products * w.unsqueeze(2)).sum(1)
    torch.testing.assert_close(cvmm(x, cvmm_prepare_sel2(sel, w), keys), summed)


@quickly
@given(chosen(), seeds, st.data())
def test_tokens_of_a_mixture_of_experts_know_nothing_of_each_other(case, seed, data):
    sel, experts = case
    torch.manual_seed(seed)
    x, weight = torch.randn(len(sel), 4).double(), torch.rand(sel.shape).double()
    w13, w2 = torch.randn(experts, 6, 4).double(), torch.randn(experts, 4, 3).double()

    def layer(tokens):
        plan = routing_plan(sel[tokens], experts)
        return moe.moe_down_combine(
            moe.moe_up_swiglu(x[tokens], w13, plan), w2, plan, weight[tokens]
        )

    whole = layer(torch.arange(len(sel)))
    some = torch.tensor(data.draw(st.permutations(range(len(sel)))), dtype=torch.int64)
    some = some[: data.draw(st.integers(0, len(sel)))]
    torch.testing.assert_close(layer(some), whole[some])
