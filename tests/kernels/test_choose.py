import pytest

from trainer.engine.recipe.tables import Kernels as Table
from trainer.kernels.attention import reference as attention
from trainer.kernels.choose import IMPLEMENTATIONS, choose


def test_attention_follows_device_and_row_length():
    assert choose({}, "cpu", 256).attention is attention.matmul
    assert choose({}, "cpu", 4096).attention is attention.sdpa
    assert choose({}, "cuda", 256).attention is attention.sdpa
    assert choose({"attention": "sdpa"}, "cpu", 256).attention is attention.sdpa


def test_reasons_name_what_was_chosen_and_why():
    reasons = choose({"attention": "sdpa"}, "cpu", 256).reasons
    assert set(reasons) == set(IMPLEMENTATIONS)
    assert reasons["attention"] == "sdpa: asked for"
    assert (
        choose({}, "cpu", 8, compiling=True).reasons["linear_cross_entropy"].startswith("compiled")
    )


def test_unknown_names_are_refused():
    with pytest.raises(KeyError, match="flash9"):
        choose({"attention": "flash9"}, "cpu", 8)


def test_a_recipe_can_name_every_implementation():
    for operation, implementations in IMPLEMENTATIONS.items():
        for name in implementations:
            assert getattr(Table.model_validate({operation: name}), operation) == name
