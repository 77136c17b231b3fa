"""What is applied to each block."""

from functools import partial

import pytest
import torch

from trainer.engine.core.errors import RecipeError
from trainer.engine.parallel.blocks import open_compiler, transform_blocks
from trainer.engine.parallel.tables import Compile, Memory
from trainer.kernels.choose import choose
from trainer.model_zoo.gemma3.config import Gemma3Config
from trainer.model_zoo.llama3.config import Llama3Config


def test_a_backend_that_torch_does_not_have_is_named_with_the_nearest():
    with pytest.raises(RecipeError, match=r"torch\.compile has no 'inductr'") as error:
        open_compiler(Compile(enabled=True, backend="inductr"), Memory())
    assert error.value.problems[0].hint == 'did you mean "inductor"?'


def test_an_operation_that_torch_does_not_have_is_named_with_the_nearest():
    config = Llama3Config(n_layers=1, dim=32).with_vocab(64)
    model = config.build(choose({}, "cpu", seq_len=8))
    memory = Memory(recompute="selective", recompute_keep=["mm", "aten.addmmm.default"])
    with pytest.raises(RecipeError, match="torch has no operation") as error:
        transform_blocks(model, config.layout, memory, None)
    (problem,) = error.value.problems
    assert (problem.key, problem.hint) == (
        "memory.recompute_keep", 'did you mean "aten.addmm.default"?',
    )  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_kinds_of_blocks_and_models_do_not_share_a_recompile_limit(recompute):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    # The first block of three sees a window, as the second does, and the last one the whole row.
    config = Gemma3Config(n_layers=3, full_every=3, window=4, dim=32, head_dim=8).with_vocab(64)
    compiler = partial(torch.compile, fullgraph=True, backend=backend)
    models = [config.build(choose({}, "cpu", seq_len=8)) for _ in range(2)]
    tokens = torch.arange(8).view(1, 8)
    plain = models[1](tokens)
    for model in models:
        memory, describe = Memory(recompute=recompute), config.describe_block
        transform_blocks(model, config.layout, memory, compiler, describe_block=describe)
    with torch._dynamo.config.patch(recompile_limit=2):
        for model in models:
            model(tokens).sum().backward()
            with torch.no_grad():
                found = model(tokens)
    torch.testing.assert_close(found, plain)
    # With and without gradients, for two kinds of blocks of two models.
    assert len(graphs) == 8
