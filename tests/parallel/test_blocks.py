"""What is applied to each block."""

import pytest

from trainer.engine.core.errors import RecipeError
from trainer.engine.parallel.blocks import open_compiler, transform_blocks
from trainer.engine.parallel.tables import Compile, Memory
from trainer.kernels.choose import choose
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
