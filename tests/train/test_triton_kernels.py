"""Models train with Triton's kernels as with torch's, in Triton's interpreter."""

import os
from unittest.mock import patch

import pytest
import torch

from tests.cases import quick
from tests.kernels.child import needs_triton
from tests.kernels.interpreted import interpreted
from tests.train.moe_family import moe_recipe
from tests.train.plans import assembled, recipe_with, train, whole
from trainer.kernels.choose import HOPPER, choose_automatically
from trainer.kernels.registry import kernels

SMALL = {"seq_len": 16, "global_batch": 2}
FAMILIES = ("llama3", "gpt_oss", "llama4", "deepseek_v3", "gemma2", "qwen3")


def recipe_of(family, names):
    if family == "experts":
        return moe_recipe({"num_experts": 4}, data=SMALL, kernels=names)
    return recipe_with(
        model={"name": family, "flavor": "debug"},
        data=recipe_with().data.model_dump(exclude_unset=True) | SMALL,
        kernels=names,
    )


def curves(family, names):
    with patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1"}):
        parts = assembled(recipe_of(family, names))
        return *train(parts, 2), whole(parts.model)


def compare(family):
    """Compare steps with the kernels of an eager run on a GPU, and return their names."""
    chosen = {
        operation: choose_automatically(operation, HOPPER, compiled=False, seq_len=16)[0]
        for operation in kernels
    }
    names = {operation: name for operation, name in chosen.items() if name == "triton"}
    *found, weights = curves(family, names)
    *wanted, expected = curves(family, dict.fromkeys(names, "torch"))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(
            torch.as_tensor(weight), torch.as_tensor(expected[name]), rtol=1e-4, atol=1e-5
        )
    return set(names)


@needs_triton
@pytest.mark.parametrize("family", quick(("experts", *FAMILIES), "llama3"))
def test_a_model_trains_with_the_kernels_of_a_gpu_as_with_torchs(family):
    names = interpreted(compare, family)
    assert names == {"rotary", "swiglu", "linear_cross_entropy", "permute"}
