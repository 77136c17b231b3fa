"""Fused experts train as the separate operations do, in Triton's interpreter, or are refused."""

import os
from unittest.mock import patch

import pytest
import torch

from tests.distributed import run_ranks
from tests.kernels.child import needs_triton
from tests.kernels.interpreted import interpreted
from tests.train.moe_family import moe_recipe
from tests.train.plans import assembled, recipe_with, train, whole
from trainer.engine.core.errors import EnvironmentFault, RecipeError
from trainer.engine.parallel import on_device
from trainer.engine.recipe.checks.checks import check
from trainer.model_zoo.layers.moe import moe_layers

CASES = {
    "plain": ({"num_experts": 4}, {}),
    "shared and dropped": (
        {"num_experts": 4, "num_shared": 1, "capacity_factor": 1.0, "aux_weight": 0.05},
        {"memory": {"recompute": "full"}},
    ),
}


def curves(case, word):
    """Return losses, norms and weights after some steps."""
    moe, changes = CASES[case]
    small = {"seq_len": 16, "global_batch": 2}
    recipe = moe_recipe(moe, data=small, kernels={"moe": word}, **changes)
    with patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1"}):
        parts = assembled(recipe)
        losses, norms = train(parts)
    return losses, norms, whole(parts.model)


def difference(case):
    from trainer.kernels.moe import triton

    launched = []
    up = triton.moe_up_swiglu
    with patch.object(triton, "moe_up_swiglu", lambda *a, **k: launched.append(a) or up(*a, **k)):
        *fused, weights = curves(case, "fused")
    *wanted, expected = curves(case, "torch")
    assert launched, "the kernel runs, not the reference"
    torch.testing.assert_close(fused, wanted, rtol=1e-5, atol=1e-6)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(
            torch.as_tensor(weight), torch.as_tensor(expected[name]), rtol=1e-4, atol=1e-5
        )
    return True


@needs_triton
@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_fused_experts_train_as_separate_operations_do(case):
    assert interpreted(difference, case)


FUSED = {"kernels": {"moe": "fused"}}


def test_fused_experts_are_refused_on_a_cpu():
    with (
        patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1"}),
        pytest.raises(RecipeError, match="run on a GPU, and this is a CPU") as error,
    ):
        assembled(moe_recipe({"num_experts": 4}, **FUSED))
    assert [problem.key for problem in error.value.problems] == ["kernels.moe"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (lambda: recipe_with(**FUSED), "has none"),
        (
            lambda: moe_recipe({"num_experts": 4}, **FUSED, parallel={"expert": 2}),
            "parallel.expert = 2",
        ),
        (
            lambda: moe_recipe(
                {"num_experts": 4, "expert_ffn_dim": 128},
                model={"dim": 128},
                **FUSED,
                precision={"float8": {"enabled": True}},
            ),
            "no kernel in float8",
        ),
        (
            lambda: moe_recipe({"num_experts": 4}, **FUSED, lora={"rank": 2, "targets": ["*"]}),
            "no kernel for adapters",
        ),
    ],
    ids=["dense", "expert parallel", "float8", "adapters"],
)
def test_what_fused_experts_do_not_compute_is_refused(recipe, message):
    found = [text for path, text, _ in check(recipe()) if path == ("kernels", "moe")]
    assert len(found) == 1
    assert message in found[0]


def unfused():
    recipe = recipe_with(model={"name": "gpt_oss", "flavor": "debug"}, **FUSED)
    alone = patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1"})
    with alone, pytest.raises(RecipeError) as error:
        assembled(recipe)
    return error.value.problems[0].message


@needs_triton
def test_a_family_with_other_experts_is_refused():
    assert "has ClampedExperts" in interpreted(unfused)


MOE = {"num_experts": 4, "expert_ffn_dim": 128}
ON_DEVICE = {"expert": 2, "expert_exchange": "on_device"}


def exchanged(cases):
    found = []
    for moe, precision, exchange in cases:
        recipe = moe_recipe(
            moe,
            model={"dim": 128, "n_layers": 1},
            data={"seq_len": 16, "global_batch": 4},
            parallel=ON_DEVICE | {"expert_exchange": exchange},
            precision={"compute": "fp32", **precision},
        )
        with patch.object(on_device, "INTERPRETED", True):
            parts = assembled(recipe)
        assert type(moe_layers(parts.model).popitem()[1].experts.exchange).__name__ == (
            "OnDeviceExchange" if exchange == "on_device" else "AllToAllExchange"
        )
        found.append((*train(parts), whole(parts.model)))
    return found


def test_an_exchange_on_the_device_computes_what_the_collectives_do():
    """On CPUs torch's collectives move rows into tensors of the same fixed sizes."""
    float8 = {"float8": {"enabled": True, "emulate": True, "targets": ["*.experts.*"]}}
    kinds = [(MOE, {}), (MOE | {"capacity_factor": 0.75}, {}), (MOE, float8)]
    cases = [(*kind, exchange) for kind in kinds for exchange in ("on_device", "all_to_all")]
    for found in run_ranks(2, exchanged, cases, timeout=280):
        for number in range(0, len(cases), 2):
            (losses, norms, weights), (wanted, wanted_norms, expected) = found[number : number + 2]
            assert losses == pytest.approx(wanted, rel=1e-6)
            assert norms == pytest.approx(wanted_norms, rel=1e-5)
            for name, weight in weights.items():
                torch.testing.assert_close(
                    torch.as_tensor(weight), torch.as_tensor(expected[name]), rtol=1e-4, atol=1e-5
                )


def refused_on_a_cpu():
    with pytest.raises(EnvironmentFault, match="needs GPUs, and this is a CPU"):
        assembled(moe_recipe(MOE, parallel=ON_DEVICE))


def test_an_exchange_on_the_device_is_refused_where_it_cannot_run():
    run_ranks(2, refused_on_a_cpu)
    for parallel, data, message in (
        ({"expert_exchange": "on_device"}, {}, "parallel.expert is 1"),
        (ON_DEVICE | {"expert_tensor": 2}, {}, "parallel.expert_tensor = 2"),
        (ON_DEVICE, {"packing": "ragged"}, 'rows are "ragged"'),
    ):
        found = check(moe_recipe(MOE, parallel=parallel, data=data))
        (text,) = (text for path, text, _ in found if path[-1] == "expert_exchange")
        assert text.endswith(message)
