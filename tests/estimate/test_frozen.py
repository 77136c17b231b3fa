"""What the simulation of a step counts of a frozen model beside the one that is trained."""

import pytest

from trainer.engine.estimate.simulate.extrapolate import count_ranks, simulate_memory
from trainer.engine.recipe.schema import Recipe

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 320}


def recipe(loss, **changes):
    """A recipe whose losses differ in their reference alone."""
    tables = {
        "run": {"steps": 1},
        "task": {"name": "preference"},
        "loss": {"name": loss},
        "model": SIZES,
        "data": {"seq_len": 32, "global_batch": 4, "micro_batch": 2},
    }
    return Recipe.model_validate(tables | changes)


@pytest.mark.parametrize("world", [1, 2])
def test_a_reference_is_stored_once_more_and_split_as_the_model(world):
    parallel = {"parallel": {"shard": world}}
    without, with_reference = (
        next(iter(count_ranks(recipe(loss, **parallel), world, 320, on_gpu=False)))
        for loss in ("simpo", "dpo")
    )
    assert with_reference.held["parameters"] == 2 * without.held["parameters"]
    assert with_reference.held["optimizer"] == without.held["optimizer"]
    # A forward pass is a third of a step.
    assert with_reference.flops["model"] > 1.2 * without.flops["model"]


def test_adapters_need_no_second_model():
    lora = {"lora": {"rank": 2}}
    without, with_reference = (
        next(iter(count_ranks(recipe(loss, **lora), 1, 320, on_gpu=False)))
        for loss in ("simpo", "dpo")
    )
    assert with_reference.held["parameters"] == without.held["parameters"]


def test_the_memory_of_a_reference_is_estimated():
    without, with_reference = (
        simulate_memory(recipe(loss), 0, 1, 320).at_peak["parameters"] for loss in ("simpo", "dpo")
    )
    # All but the buffers, which both models have.
    assert with_reference == 2 * without
