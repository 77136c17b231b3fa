"""Windows, chunks and sinks where ranks share a sequence, against attention over all of it."""

import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.kernels.implementations import load_implementations
from tests.parallel.test_ring import share, some_documents
from trainer.engine.parallel.context.context import ContextParallel
from trainer.kernels.attention.reference import document_mask
from trainer.kernels.choose import choose

REACHES = [({"window": 5}, True), ({"window": 5}, False), ({"chunk": 6}, False), ({}, True)]


def differences():
    """Return how far outputs and gradients of this rank are from its part of the whole's."""
    context = ContextParallel(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    found = []
    for name, attend in load_implementations("attention").items():
        kernels = context.adapt_kernels(choose({"attention": name}, "cpu", 64), None)
        for reach, with_documents in REACHES:
            generator = torch.Generator().manual_seed(1)
            shapes = [(2, 16, heads, 4) for heads in (4, 2, 2, 4)]
            *whole, direction = (torch.randn(s, generator=generator).double() for s in shapes)
            sinks = torch.randn(4, generator=generator).double().requires_grad_()
            for each in whole:
                each.requires_grad_()
            ids = some_documents(16) if with_documents else None
            mask = None if ids is None else document_mask(ids, ids)
            expected = attend(*whole, mask, **reach, sinks=sinks)
            wanted = [expected, *torch.autograd.grad(expected, (*whole, sinks), direction)]

            *mine, along = (share(context, x.detach()) for x in (*whole, direction))
            for each in mine:
                each.requires_grad_()
            seen = None if ids is None else kernels.attention_mask(ids, ids)
            out = kernels.attention(*mine, seen, **reach, sinks=sinks)
            *got, for_sinks = [out, *torch.autograd.grad(out, (*mine, sinks), along)]
            for part, all_of_it in zip(got, wanted, strict=False):
                found.append((part - share(context, all_of_it)).abs().max().item())
            dist.all_reduce(for_sinks)
            found.append((for_sinks - wanted[-1]).abs().max().item())
    return found


def test_ranks_that_share_a_sequence_attend_as_one():
    for found in run_ranks(2, differences):
        assert len(found) == 2 * len(REACHES) * 5
        assert all(error < 1e-12 for error in found)
