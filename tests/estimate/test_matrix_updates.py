"""What a plan counts of an optimizer of whole matrices is what real ranks send and compute."""

import os

import pytest

from tests.distributed import run_ranks
from tests.estimate.test_plan_counts import BASE, CPU, EXPERTS, VOCAB
from trainer.engine.assemble.build import build_model, build_step
from trainer.engine.estimate.simulate.build import step_batches
from trainer.engine.estimate.simulate.count import count_step
from trainer.engine.estimate.simulate.extrapolate import count_ranks
from trainer.engine.estimate.step_sizes import StepSizes
from trainer.engine.parallel.materialize import materialize
from trainer.engine.parallel.plan import make_plan
from trainer.engine.recipe.schema import Recipe

PLANS = {
    "shard": ({}, {}),
    "pipeline": ({"pipeline": 2, "shard": 2}, {}),
    "experts": ({"expert": 2, "expert_tensor": 2, "tensor": 2}, {"model": EXPERTS}),
}


def recipe_of(name):
    parallel, changes = PLANS[name]
    values = {**BASE, "optimizer": {"name": "muon"}, "parallel": parallel, **changes}
    return Recipe.model_validate(values)


def counted():
    """Return the counts of this rank's second step under each plan."""
    found, rank = {}, int(os.environ["RANK"])
    for name in PLANS:
        recipe = recipe_of(name)
        plan = make_plan(recipe.parallel, rank, 4, CPU)
        built = build_model(recipe, VOCAB, CPU, plan)
        materialize(built.model, CPU, 0)
        step = build_step(recipe, built, plan)
        for _ in range(2):
            found[name] = count_step(step, step_batches(recipe.data, step, plan), rank)
    return found


def planned():
    """Return the counts of the plans, from small simulations and from whole ones."""
    return {
        (name, whole): list(count_ranks(recipe_of(name), 4, VOCAB, on_gpu=False, whole=whole))
        for name in PLANS
        for whole in (False, True)
    }


@pytest.mark.timeout(600)
def test_bytes_flops_and_state_are_those_of_real_ranks():
    real = run_ranks(4, counted, timeout=300)
    (plans,) = run_ranks(1, planned, timeout=300)
    for (name, _), places in plans.items():
        assert any(route.kind == "all-to-all" for route in places[0].calls)
        for place, counts in enumerate(places):
            expected = real[place * (4 // len(places))][name]
            assert counts.flops["optimizer"] > 0
            assert counts == expected, name


def test_formulas_know_the_state_of_matrices_and_of_others():
    sizes = StepSizes.of(recipe_of("shard"))
    blocks, ends = 2 * sizes.block, sizes.ends
    matrices = blocks - 2 * 2 * 32  # two norms of 32 a block
    whole = blocks + ends
    # Momentum alone is kept of matrices, two moments of others; steps are counted in a tensor.
    expected = (4 * matrices + (8 + 4 / 64**2) * (whole - matrices)) / whole
    assert sizes.state == pytest.approx(expected)
