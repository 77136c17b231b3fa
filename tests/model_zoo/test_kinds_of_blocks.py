"""Families whose blocks see the row differently: packed, cached, compiled, simulated."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cases import also, quick
from tests.model_zoo import test_gpt_oss, test_llama4
from tests.model_zoo.peers import (
    assert_cache_changes_nothing,
    assert_documents_are_as_if_alone,
    documents,
    tokens,
)
from trainer.engine.parallel.materialize import without_storage
from trainer.kernels.choose import choose
from trainer.kernels.cross_entropy.reference import linear_cross_entropy

FAMILIES = {"gpt_oss": test_gpt_oss, "llama4": test_llama4}


def model_of(family, attention="auto", **changes):
    return FAMILIES[family].model_of(attention, **changes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
def test_documents_in_a_row_are_as_if_alone(family, attention):
    """Windows, chunks and the scale of queries are counted in a document."""
    assert_documents_are_as_if_alone(model_of(family, attention), [5, 1, 17, 10])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pieces", [[1] * 20, [7, 1, 12], [20]])
@pytest.mark.parametrize("packed", [False, True])
def test_decoding_with_a_cache_equals_the_full_pass(family, pieces, packed):
    positions, ids = documents([3, 11, 6])
    columns = {"positions": positions, "document_ids": ids} if packed else {}
    assert_cache_changes_nothing(model_of(family), pieces, tokens(1, 20), **columns)


def kinds(model):
    """Return how many kinds of blocks a model has."""
    return len({(b.attention.window, b.attention.chunk, type(b.mlp)) for b in model.layers})


@pytest.mark.parametrize("family", quick(FAMILIES, "gpt_oss"))
@pytest.mark.parametrize("attention", ["sdpa", *also("matmul")])
@pytest.mark.parametrize("packed", [True, *also(False)])
def test_blocks_compile_to_one_graph_a_kind(family, attention, packed):
    torch._dynamo.reset()
    eager, model = (model_of(family, attention) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers:
        block.compile(backend=counter, fullgraph=True)
    positions, ids = documents([9, 24]) if packed else (None, None)
    for seed in range(2):
        x = torch.randint(0, 61, (1, 33), generator=torch.Generator().manual_seed(seed))
        where = {"positions": positions, "document_ids": ids}
        losses = [m(x, labels=x, loss=linear_cross_entropy, **where) for m in (model, eager)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    assert counter.frame_count == kinds(model)
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
def test_a_step_is_simulated_without_weights(family, attention):
    config = model_of(family).config
    with without_storage():
        model = config.build(choose({"attention": attention}, "cpu", 64))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.init_buffers(torch.device("cpu"))
        x = torch.zeros(2, 33, dtype=torch.int64)
        model(x, labels=x, loss=linear_cross_entropy).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.shape == parameter.shape, name


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bf16_the_loss_is_near_that_of_fp32(family):
    model = model_of(family)
    x = tokens(2, 33)
    exact = model(x, labels=x, loss=linear_cross_entropy).item()
    model.compute_dtype = torch.bfloat16
    loss = model(x, labels=x, loss=linear_cross_entropy)
    loss.backward()
    assert loss.item() == pytest.approx(exact, rel=3e-2)
    assert all(p.grad.isfinite().all() for p in model.parameters())
