"""Ring attention against attention over whole sequences, in float64."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.distributed import run_ranks
from trainer.engine.data.batch import TokenBatch
from trainer.engine.parallel.context.context import ContextParallel
from trainer.engine.parallel.context.ring import ring_attention
from trainer.engine.parallel.plan import make_plan
from trainer.engine.parallel.tables import Parallel
from trainer.kernels.attention import reference
from trainer.kernels.choose import PARTIAL_ATTENTION, choose

HEADS, GROUPS, WIDTH, VALUE_WIDTH = 3, 1, 8, 6
PIECES = (1, 2, 3, 4, 5)


def ring_kernels(name):
    context = ContextParallel(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), True)
    return context, context.adapt_kernels(choose({"attention": name}, "cpu", 64), None)


def columns(length, dtype):
    """Return query, key, value and a direction of whole rows."""
    generator = torch.Generator().manual_seed(length)
    shapes = [
        (2, length, heads, width)
        for heads, width in (
            (HEADS, WIDTH),
            (GROUPS, WIDTH),
            (GROUPS, VALUE_WIDTH),
            (HEADS, VALUE_WIDTH),
        )
    ]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def some_documents(length):
    """Return document ids: short ones in the first row, one alone in the second."""
    rows = [[position // 3 for position in range(length)], [0] * length]
    return torch.tensor(rows, dtype=torch.int32)


def share(context, whole):
    """Return this rank's part of [B, S, ...]."""
    return torch.cat([whole.chunk(2 * context.ranks, 1)[n] for n in context.pieces], 1)


def differences(name, dtype, compiled=False):
    """Return how far outputs and gradients of this rank are from its part of the whole's."""
    context, kernels = ring_kernels(name)
    attend, found = kernels.attention, []
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for piece in PIECES:
        length = 2 * context.ranks * piece
        for documents in (None, some_documents(length)):
            *whole, direction = columns(length, torch.float64)
            for each in whole:
                each.requires_grad_()
            mask = None if documents is None else reference.document_mask(documents, documents)
            expected = reference.sdpa(*whole, mask)
            wanted = [expected, *torch.autograd.grad(expected, whole, direction)]

            *mine, along = (share(context, x.detach()).to(dtype) for x in (*whole, direction))
            for each in mine:
                each.requires_grad_()
            seen = None if documents is None else kernels.attention_mask(documents, documents)
            out = attend(*mine, seen)
            got = [out, *torch.autograd.grad(out, mine, along)]
            assert all(each.dtype == dtype for each in got)
            for mine, whole in zip(got, wanted, strict=True):
                exact = share(context, whole.detach())
                found.append(((mine.detach().double() - exact).norm() / exact.norm()).item())
    return found


@pytest.mark.parametrize("name", PARTIAL_ATTENTION)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_outputs_and_gradients_are_those_of_whole_sequences(ranks, name):
    for found in run_ranks(ranks, differences, name, torch.float64):
        assert len(found) == 2 * 4 * len(PIECES)
        assert all(error < 1e-13 for error in found)


@pytest.mark.parametrize("name", PARTIAL_ATTENTION)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_low_precision(name, dtype, tolerance):
    for found in run_ranks(2, differences, name, dtype):
        assert all(error < tolerance for error in found)


@pytest.mark.matrix
def test_compiled():
    for found in run_ranks(2, differences, "sdpa", torch.float64, True, timeout=120):
        assert all(error < 1e-13 for error in found)


def recomputed(name):
    """Return gradients, plain and with the forward pass repeated but for products and kernels."""
    aten = torch.ops.aten
    kept = [aten.mm.default, aten.bmm.default]
    kept.append(aten._scaled_dot_product_flash_attention_for_cpu.default)
    contexts = partial(create_selective_checkpoint_contexts, kept)
    context, kernels = ring_kernels(name)
    *mine, along = (share(context, x) for x in columns(24 * context.ranks, torch.float32))
    mine = [each.requires_grad_() for each in mine]
    outs = [
        kernels.attention(*mine),
        checkpoint(kernels.attention, *mine, use_reentrant=False, context_fn=contexts),
    ]
    return [[x.numpy() for x in torch.autograd.grad(out, mine, along)] for out in outs]


@pytest.mark.parametrize("name", PARTIAL_ATTENTION)
def test_selective_recomputation_changes_nothing(name):
    for plain, again in run_ranks(2, recomputed, name):
        for one, other in zip(plain, again, strict=True):
            assert (one == other).all()


def work(with_documents):
    """Return the multiplications of a rank's products, and the bytes that it sends."""
    context, kernels = ring_kernels("matmul")
    products, sent = [], []
    forward = kernels.partial_attention.forward

    def counted(query, key, value, mask, causal, softcap):
        products.append(query.shape[1] * key.shape[1] / (2 if causal else 1))
        return forward(query, key, value, mask, causal, softcap)

    def exchange(operations):
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return original(operations)

    whole = columns(16 * context.ranks, torch.float32)
    q, k, v, _ = (share(context, x) for x in whole)
    documents = some_documents(whole[0].shape[1])
    seen = kernels.attention_mask(documents, documents) if with_documents else None
    kernel = kernels.partial_attention._replace(forward=counted)
    original = dist.batch_isend_irecv
    with patch.object(dist, "batch_isend_irecv", exchange):
        ring_attention(q, k, v, seen, kernel=kernel, group=dist.group.WORLD)
    return sum(products), sent


@pytest.mark.parametrize("with_documents", [False, True])
def test_ranks_do_the_same_work_and_repeat_no_heads(with_documents):
    first, *others = run_ranks(4, work, with_documents)
    assert all(each == first for each in others)
    products, sent = first
    # Of the 64 x 64 products half are seen, by four ranks; masked ones also fill the squares that
    # the diagonal cuts.
    assert products == 16 * 16 * 4 / 2 + (8 * 8 if with_documents else 0)
    assert sent == [2 * 16 * GROUPS * (WIDTH + VALUE_WIDTH) * 4] * 3


def taken():
    context, kernels = ring_kernels("sdpa")
    documents = some_documents(8 * context.ranks)
    batch = TokenBatch(documents.long(), documents.long(), documents.long(), documents)
    parts = kernels.attention_mask(documents, context.take(batch).document_ids)
    assert torch.equal(parts[:, context.rank], share(context, documents))
    return parts.tolist()


def test_every_rank_knows_the_documents_of_the_others():
    found = run_ranks(4, taken)
    assert all(each == found[0] for each in found)


def test_a_ring_of_one_is_warned_about(caplog):
    make_plan(Parallel(context_exchange="ring"), 0, 1, torch.device("cpu"))
    assert 'context_exchange = "ring" has no effect: parallel.context is 1' in caplog.text
