"""Windows, chunks, sinks and caps where ranks share a sequence, against attention to all of it."""

import pytest
import torch
import torch.distributed as dist

from tests.cases import also
from tests.distributed import run_ranks
from tests.kernels.implementations import load_implementations
from tests.parallel.test_ring import share, some_documents
from trainer.engine.parallel.context.context import ContextParallel
from trainer.kernels.attention.reference import document_mask
from trainer.kernels.choose import choose

REACHES = [
    ({"window": 5}, True),
    ({"window": 5}, False),
    ({"chunk": 6}, False),
    ({}, True),
    ({"window": 5, "softcap": 0.5}, True),
    ({"softcap": 0.5}, False),
]


def differences(changes):
    """Return how far outputs and gradients of this rank are from its part of the whole's."""
    in_ring, length = changes.get("in_ring", False), changes.get("length", 16)
    context = ContextParallel(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), in_ring)
    found = []
    for name, attend in load_implementations("attention").items():
        kernels = context.adapt_kernels(choose({"attention": name}, "cpu", 64), None)
        attend_part = kernels.attention
        if changes.get("compiled"):
            torch._dynamo.reset()  # which compiles a function a few times at most
            attend_part = torch.compile(attend_part, backend="aot_eager", fullgraph=True)
        for reach, with_documents in REACHES:
            generator = torch.Generator().manual_seed(1)
            shapes = [(2, length, heads, 4) for heads in (4, 2, 2, 4)]
            *whole, direction = (torch.randn(s, generator=generator).double() for s in shapes)
            sinks = torch.randn(4, generator=generator).double().requires_grad_()
            for each in whole:
                each.requires_grad_()
            ids = some_documents(length) if with_documents else None
            mask = None if ids is None else document_mask(ids, ids)
            expected = attend(*whole, mask, **reach, sinks=sinks)
            wanted = [expected, *torch.autograd.grad(expected, (*whole, sinks), direction)]

            *mine, along = (share(context, x.detach()) for x in (*whole, direction))
            for each in mine:
                each.requires_grad_()
            seen = None if ids is None else kernels.attention_mask(ids, ids)
            out = attend_part(*mine, seen, **reach, sinks=sinks)
            *got, for_sinks = [out, *torch.autograd.grad(out, (*mine, sinks), along)]
            for part, all_of_it in zip(got, wanted, strict=False):
                found.append((part - share(context, all_of_it)).abs().max().item())
            dist.all_reduce(for_sinks)
            found.append((for_sinks - wanted[-1]).abs().max().item())
    return found


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {}),
        (2, {"in_ring": True}),
        *also(
            (3, {"in_ring": True, "length": 36}),
            (4, {"in_ring": True, "length": 8}),
            (2, {"in_ring": True, "compiled": True}),
        ),
    ],
)
def test_ranks_that_share_a_sequence_attend_as_one(ranks, changes):
    for found in run_ranks(ranks, differences, changes, timeout=200):
        assert len(found) == 2 * len(REACHES) * 5
        assert all(error < 1e-12 for error in found)
