"""Windows, chunks and sinks against the formula in float64, a query at a time."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import also
from tests.kernels.implementations import load_implementations
from tests.kernels.test_attention import document_mask, inputs

ATTENTION = load_implementations("attention")


def formula(query, key, value, mask=None, *, window=None, chunk=None, sinks=None):
    """Softmax over the keys in reach, and a sink's score beside theirs, for each query alone."""
    batch, queries, heads, width = query.shape
    keys, repeats, rows = key.shape[1], heads // key.shape[2], []
    for b in range(batch):
        for s in range(queries):
            own = keys - queries + s
            seen = [
                k
                for k in range(own + 1)
                if (mask is None or mask[b, 0, s, k])
                and (window is None or own - k < window)
                and (chunk is None or own // chunk == k // chunk)
            ]
            k, v = (x[b, seen].repeat_interleave(repeats, 1) for x in (key, value))
            powers = (torch.einsum("lhk,hk->lh", k, query[b, s]) / width**0.5).exp()
            total = powers.sum(0) + (0 if sinks is None else sinks.exp())
            rows.append(torch.einsum("lh,lhk->hk", powers / total, v))
    return torch.stack(rows).view_as(query)


REACHES = {
    "window of one": {"window": 1},
    "short window": {"window": 5},
    "long window": {"window": 70},
    "window over all": {"window": 1000},
    "short chunks": {"chunk": 4},
    "long chunks": {"chunk": 50},
    "chunk over all": {"chunk": 1000},
    "everything": {},
}
SHAPES = [
    # queries, keys, heads, groups, width
    (1, 1, 1, 1, 2),
    (7, 7, 4, 2, 6),
    (1, 9, 4, 1, 4),
    (5, 12, 6, 3, 2),
    (64, 64, 2, 1, 2),
    (3, 140, 2, 1, 2),
]
LONG = (130, 131, 2, 2, 2)


def compare(name, shape, with_sinks, mask, reach):
    q, k, v = inputs(2, *shape)
    leaves = [q, k, v]
    reach = dict(reach)
    if with_sinks:
        reach["sinks"] = torch.randn(shape[2], dtype=q.dtype).requires_grad_()
        leaves.append(reach["sinks"])
    out = ATTENTION[name](q, k, v, mask, **reach)
    expected = formula(q, k, v, mask, **reach)
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, direction),
        torch.autograd.grad(expected, leaves, direction),
    )


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("shape", [*SHAPES, LONG])
def test_outputs_and_gradients_equal_the_formula(name, with_sinks, reach, shape):
    compare(name, shape, with_sinks, None, REACHES[reach])


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("reach", [key for key in REACHES if "chunk" not in key])
@pytest.mark.parametrize("shape", [*SHAPES, *also((LONG,))])
def test_documents_bound_what_is_in_reach(name, with_sinks, reach, shape):
    compare(name, shape, with_sinks, document_mask(2, *shape[:2]), REACHES[reach])


@pytest.mark.parametrize("name", ATTENTION)
def test_gradients_with_sinks_equal_finite_differences(name):
    q, k, v = inputs(1, 3, 4, 2, 1, 2)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda *x: ATTENTION[name](*x[:3], None, window=2, sinks=x[3]), (q, k, v, sinks)
    )


class Largest(TorchDispatchMode):
    """Finds the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return found


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("reach", [{"window": 16}, {"chunk": 16}])
def test_work_grows_with_the_reach_and_not_with_the_row(name, reach):
    counts = []
    for length in (512, 1024):
        q, k, v = inputs(1, length, length, 2, 1, 4, torch.float32)
        with Largest() as largest:
            ATTENTION[name](q, k, v, **reach)
        counts.append(largest.numel)
    assert counts[1] == 2 * counts[0]


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("reach", [{"window": 5}, {"chunk": 4}])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_low_precision_is_close_to_float64_and_keeps_its_dtype(name, reach, dtype, tolerance):
    q, k, v = inputs(2, 70, 70, 4, 2, 8, dtype)
    sinks = torch.randn(4)
    out = ATTENTION[name](q, k, v, **reach, sinks=sinks)
    assert out.dtype == dtype
    expected = formula(q.double(), k.double(), v.double(), **reach, sinks=sinks.double())
    assert (out - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(
    ("reach", "masked"),
    [({"window": 5}, True), *also(({"window": 5}, False), ({"chunk": 4}, False), ({}, True))],
)
def test_compiled_attention_is_one_graph_and_gives_the_same(name, reach, masked):
    torch._dynamo.reset()
    q, k, v = inputs(2, 70, 70, 4, 2, 8, torch.float32)
    sinks = torch.randn(4, requires_grad=True)
    mask = document_mask(2, 70, 70) if masked else None

    def attention(q, k, v, sinks):
        return ATTENTION[name](q, k, v, mask, **reach, sinks=sinks)

    results = []
    for function in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        out = function(q, k, v, sinks)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, sinks))))
    torch.testing.assert_close(*results)
