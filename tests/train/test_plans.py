"""Every data parallel plan gives the losses and gradient norms of one process."""

import pytest

from tests.cases import also, quick
from tests.distributed import run_ranks
from tests.train.plans import BASE, assert_same, curves, recipe_with

PLANS = {
    "replicate-2": (2, {"replicate": 2, "shard": 1}),
    "shard-2": (2, {"shard": 2}),
    "no_shard-2": (2, {"fsdp": {"strategy": "no_shard"}}),
    "shard_grad_op-2": (2, {"fsdp": {"strategy": "shard_grad_op"}}),
    "offload-2": (2, {"fsdp": {"offload": True}}),
    "replicate-4": (4, {"replicate": -1, "shard": 1}),
    "shard-4": (4, {"shard": -1}),
    "hybrid-2x2": (4, {"replicate": 2, "shard": 2, "fsdp": {"strategy": "hybrid_shard"}}),
    "hybrid-zero2-2x2": (
        4,
        {"replicate": 2, "shard": 2, "fsdp": {"strategy": "hybrid_shard_zero2"}},
    ),
}

IN_EVERY_RUN = ("replicate-2", "no_shard-2", "offload-2", "shard-4", "hybrid-zero2-2x2")


@pytest.mark.parametrize("plan", quick(PLANS, *IN_EVERY_RUN))
def test_plan_gives_the_curves_of_one_process(plan, alone):
    world, parallel = PLANS[plan]
    assert_same(world, alone, parallel=parallel, data=BASE["data"] | {"packing": "documents"})


@pytest.mark.parametrize("packing", ["none", *also("concat")])
@pytest.mark.parametrize("plan", ["hybrid-2x2", *also("replicate-2", "shard-4")])
def test_every_packing_mode_under_plans(plan, packing, alone):
    world, parallel = PLANS[plan]
    assert_same(world, alone, parallel=parallel, data=BASE["data"] | {"packing": packing})


@pytest.mark.parametrize("plan", ["shard-2", *also("replicate-2")])
def test_adamw_and_tied_embeddings_under_plans(plan, alone):
    world, parallel = PLANS[plan]
    assert_same(
        world,
        alone,
        parallel=parallel,
        model=BASE["model"] | {"tie_embeddings": True},
        optimizer={"name": "adamw", "lr": 3e-3},
    )


def test_copies_average_their_gradients_in_bf16(alone):
    changed = recipe_with(
        parallel=PLANS["replicate-2"][1], precision={"compute": "fp32", "reduce": "bf16"}
    )
    for result in run_ranks(2, curves, changed):
        for got, wanted in zip(result, alone(), strict=True):
            assert got == pytest.approx(wanted, rel=2**-6)
        assert result[1] != pytest.approx(alone()[1], rel=1e-6), "norms of rounded gradients"


@pytest.mark.parametrize("micro_batch", [3, *also(2, 8)])
def test_accumulation_does_not_change_the_curves(micro_batch, alone):
    """Rows hold unequal numbers of valid tokens: a mean of means would differ."""
    data = BASE["data"] | {"packing": "none"}
    expected = alone(data=data)
    result = run_ranks(1, curves, recipe_with(data=data | {"micro_batch": micro_batch}))[0]
    for got, wanted in zip(result, expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-5, rel=1e-5)


def test_recomputation_and_compiled_blocks_do_not_change_the_curves(alone):
    expected = alone()
    changed = recipe_with(memory={"recompute": "full"})
    assert run_ranks(1, curves, changed)[0] == expected
    compiled = recipe_with(compile={"enabled": True, "backend": "aot_eager"})
    for got, wanted in zip(run_ranks(1, curves, compiled)[0], expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-5)
