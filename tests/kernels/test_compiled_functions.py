"""Gradients of our own autograd functions, compiled: torch 2.11 gets some forms of them wrong."""

import pytest
import torch

from trainer.kernels.attention.reference import sdpa
from trainer.kernels.swiglu.reference import clamped_swiglu, geglu, swiglu


def attend_with_sinks(x, weight):
    heads = x.view(1, 8, 2, 4)
    return sdpa(heads, 2 * heads, heads + 1, sinks=weight[0, :2])


def attend_with_a_cap(x, weight):
    heads = x.view(1, 8, 2, 4)
    return sdpa(heads, 2 * heads, heads + weight.view_as(heads), softcap=0.5)


FUNCTIONS = {
    "swiglu": lambda x, weight: swiglu(x, x @ weight),
    "swiglu of weighed rows": lambda x, weight: swiglu(x, x @ weight, x[:, 0]),
    "clamped swiglu": lambda x, weight: clamped_swiglu(x, x @ weight, limit=1.0, alpha=1.7),
    "geglu": lambda x, weight: geglu(x, x @ weight),
    "attention with sinks": attend_with_sinks,
    "attention with a cap": attend_with_a_cap,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_function_has_the_same_gradients(name):
    torch.manual_seed(0)
    x, weight = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    function = FUNCTIONS[name]
    torch._dynamo.reset()
    results = []
    for each in (function, torch.compile(function, backend="eager", fullgraph=True)):
        out = each(x, weight)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, weight))))
    torch.testing.assert_close(*results)
