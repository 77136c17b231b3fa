"""What a plan counts of an optimizer of whole matrices is what real ranks send and compute."""

import os
from math import prod

import pytest

from tests.distributed import run_ranks
from tests.estimate.test_plan_counts import BASE, CPU, EXPERTS, VOCAB
from trainer.engine.assemble.build import build_model, build_step
from trainer.engine.estimate.simulate.build import step_batches
from trainer.engine.estimate.simulate.count import count_step
from trainer.engine.estimate.simulate.extrapolate import count_ranks
from trainer.engine.estimate.step_sizes import StepSizes, _state_bytes
from trainer.engine.parallel.materialize import materialize
from trainer.engine.parallel.plan import make_plan
from trainer.engine.recipe.schema import Recipe

PLANS = {
    "shard": ({}, {}),
    "soap": ({}, {"optimizer": {"name": "soap", "basis_interval": 3}}),
    "pipeline": ({"pipeline": 2, "shard": 2}, {"optimizer": {"name": "normuon"}}),
    "experts": (
        {"expert": 2, "expert_tensor": 2, "tensor": 2},
        {"model": EXPERTS, "optimizer": {"name": "muonh"}},
    ),
    "clip": ({"context": 2, "tensor": 2}, {"optimizer": {"name": "muonclip", "by_head": True}}),
    "adamh": ({}, {"optimizer": {"name": "adamh"}}),
    "dion2": ({"tensor": 2, "shard": 2}, {"optimizer": {"name": "dion2"}}),
    "soap of experts": (
        {"expert": 2, "expert_tensor": 2, "tensor": 2},
        {"model": EXPERTS, "optimizer": {"name": "soap_muon"}},
    ),
}
SHAPES = {
    "layers.0.up.weight": (48, 32),
    "layers.0.norm.weight": (32,),
    "layers.0.mlp.experts.up": (3, 24, 32),
    "embed.weight": (100, 32),
}


def recipe_of(name):
    parallel, changes = PLANS[name]
    values = {**BASE, "optimizer": {"name": "muon"}, "parallel": parallel, **changes}
    return Recipe.model_validate(values)


def counted(names):
    """Return the counts of this rank's second step under each plan."""
    found, rank = {}, int(os.environ["RANK"])
    for name in names:
        recipe = recipe_of(name)
        plan = make_plan(recipe.parallel, rank, 4, CPU)
        built = build_model(recipe, VOCAB, CPU, plan)
        materialize(built.model, CPU, 0)
        step = build_step(recipe, built, plan)
        for _ in range(2):
            found[name] = count_step(step, step_batches(recipe.data, step, plan), rank)
    return found


def planned(names):
    """Return the counts of the plans, from small simulations and from whole ones."""
    return {
        (name, whole): list(count_ranks(recipe_of(name), 4, VOCAB, on_gpu=False, whole=whole))
        for name in names
        for whole in (False, True)
    }


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_bytes_flops_and_state_are_those_of_real_ranks():
    real = run_ranks(4, counted, list(PLANS), timeout=300)
    (plans,) = run_ranks(1, planned, list(PLANS), timeout=300)
    for (name, _), places in plans.items():
        sends = any(route.kind == "all-to-all" for route in places[0].calls)
        assert sends == (name != "adamh")  # which computes on parts, and sends norms
        for place, counts in enumerate(places):
            expected = real[place * (4 // len(places))][name]
            assert (counts.flops["optimizer"] > 0) == sends
            assert counts == expected, name


def test_the_flops_of_bases_are_divided_by_their_interval():
    flops = {}
    for interval in (1, 4):
        keys = {"optimizer": {"name": "soap", "basis_interval": interval}}
        recipe = Recipe.model_validate({**BASE, **keys})
        (counts,) = count_ranks(recipe, 1, VOCAB, on_gpu=False)
        flops[interval] = counts.flops["optimizer"]
    block = [(32, 32), (16, 32), (16, 32), (32, 32), (64, 32), (64, 32), (32, 64)]
    # The mean leaves the old bases for the new ones, of which each is a product and its QR.
    moved = sum(4 * m * n * (m + n) for m, n in block)
    made = sum((2 + 8 / 3) * (m**3 + n**3) for m, n in block)
    assert flops[1] - flops[4] == pytest.approx(2 * (moved + made) * 3 / 4, rel=1e-4)


def test_formulas_know_the_state_of_matrices_and_of_others():
    sizes = StepSizes.of(recipe_of("shard"))
    blocks, ends = 2 * sizes.block, sizes.ends
    matrices = blocks - 2 * 2 * 32  # two norms of 32 a block
    whole = blocks + ends
    # Momentum alone is kept of matrices, two moments of others; steps are counted in a tensor.
    others = 2 + 2 * 2 + 1
    expected = (4 * matrices + 8 * (whole - matrices) + 4 * others) / whole
    assert sizes.state == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        # Two moments, and two squares a side; AdamW's moments and step of other weights.
        ("soap", (2 * 48 * 32 + 2 * 48**2 + 2 * 32**2) + (2 * 32 + 1)
            + 3 * (2 * 24 * 32 + 2 * 24**2 + 2 * 32**2) + (2 * 3200 + 1)),
        # Two moments and the last gradient of every element.
        ("mars", 3 * (48 * 32 + 32 + 3 * 24 * 32 + 3200)),
        # A number a row and a column of a matrix, of the embedding's too.
        ("adafactor", (48 + 32) + 32 + 3 * (24 + 32) + (100 + 32)),
    ],
)  # fmt: skip
def test_formulas_count_state_that_is_not_shaped_like_its_weight(name, elements):
    config = Recipe.model_validate({"optimizer": {"name": name}, "run": {"steps": 1}}).optimizer
    layout = Recipe.model_validate({**BASE, "model": EXPERTS}).model.layout
    total = sum(map(prod, SHAPES.values()))
    found = _state_bytes(config, SHAPES, layout)
    assert found * total == pytest.approx(4 * elements)
