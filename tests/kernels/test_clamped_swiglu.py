"""SwiGLU with limits against the formula, and its gradients against finite differences."""

import pytest
import torch
from torch.autograd import gradcheck
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from trainer.kernels.swiglu.reference import clamped_swiglu


def columns(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 6), (5, 6), (5,))
    return [
        (2 * torch.randn(s, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for s in shapes
    ]


def test_it_is_what_transformers_computes_within_and_beyond_the_limits():
    gate, up, weight = columns()
    config = GptOssConfig(num_local_experts=1, hidden_size=4, intermediate_size=6, swiglu_limit=2.0)
    expected = GptOssExperts(config)._apply_gate(torch.stack([gate, up], -1).flatten(-2))
    assert (gate > 2).any()
    assert (up.abs() > 2).any()
    out = clamped_swiglu(gate, up, 2.0, 1.702)
    torch.testing.assert_close(out, expected)
    weighted = clamped_swiglu(gate, up, 2.0, 1.702, weight)
    torch.testing.assert_close(weighted, expected * weight.unsqueeze(-1))


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_equal_finite_differences(weighted):
    gate, up, weight = columns()
    given = (gate, up, weight if weighted else None)
    assert gradcheck(lambda g, u, w: clamped_swiglu(g, u, 2.0, 1.702, w), given)


def test_bf16_is_computed_in_fp32_and_rounded_once():
    gate, up, weight = (x.detach() for x in columns(torch.bfloat16))
    out = clamped_swiglu(gate, up, 2.0, 1.702, weight)
    exact = clamped_swiglu(gate.float(), up.float(), 2.0, 1.702, weight.float())
    assert torch.equal(out, exact.bfloat16())
