"""Blocks compile as one graph each, once."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.model_zoo.peers import our_model
from trainer.kernels.cross_entropy.reference import linear_cross_entropy


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_compile_to_one_graph_without_breaks_or_recompilation(attention, dtype):
    eager = our_model(attention=attention, n_layers=3)
    model = our_model(attention=attention, n_layers=3)
    eager.compute_dtype = model.compute_dtype = dtype
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers:
        block.compile(backend=counter, fullgraph=True)
    for step in range(3):
        x = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(step))
        losses = [m(x, labels=x, loss=linear_cross_entropy) for m in (model, eager)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
    assert counter.frame_count == 1
    if dtype == torch.float32:
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            # Of sums of losses: gradients reach 60.
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_a_loss_compiled_with_the_model_around_it_is_the_same():
    eager, model = our_model(), our_model()
    x = torch.randint(0, 61, (2, 40))
    losses = [
        m(x, labels=x, loss=linear_cross_entropy)
        for m in (eager, torch.compile(model, backend="aot_eager"))
    ]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_documents_and_evaluation_compile_once_each():
    model = our_model()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers:
        block.compile(backend=counter, fullgraph=True)
    x = torch.randint(0, 61, (2, 40))
    for _ in range(2):
        ids = torch.randint(0, 4, (2, 40)).sort().values.int()
        positions = torch.randint(0, 40, (2, 40))
        model(x, labels=x, loss=linear_cross_entropy, positions=positions, document_ids=ids)
        with torch.no_grad():
            model(x, labels=x, loss=linear_cross_entropy, positions=positions, document_ids=ids)
    assert counter.frame_count == 2
