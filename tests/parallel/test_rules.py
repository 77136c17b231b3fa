"""Weights stored as rules say train as in one process, wherever they are."""

from functools import cache

import pytest
from torch.distributed.tensor import DTensor

from tests.cases import quick
from tests.distributed import run_ranks
from tests.train.plans import assembled, assert_same, curves, recipe_with, train, weights
from tests.train.processes import complaints, finish, rows, start, write_recipe
from trainer.engine.core.errors import RecipeError
from trainer.engine.parallel.mesh import Degrees
from trainer.engine.recipe.placements import placements

UP, DOWN = r".*\.mlp\.up\.weight", r".*\.mlp\.down\.weight"


@cache
def curves_of_one_process(text):
    return run_ranks(1, curves, recipe_with(**eval(text)))[0]


def alone(**changes):
    return curves_of_one_process(repr(changes))


def rule(match, **place):
    return {"match": match, "place": place}


KEPT = [rule(UP), rule(r".*\.norm\.weight"), rule("embed.weight"), rule(r".*\.k\.weight")]
"""weights that every rank stores whole: of every style"""

TENSOR = [
    rule(UP),  # columns: a piece of the whole is used
    rule(r".*\.gate\.weight", tensor=1),  # columns, by the other dim
    rule(DOWN, tensor=0),  # rows, by the other dim
    rule(r".*\.q\.weight", shard=0),  # not named: whole along the tensor axis
    rule(r"layers\.0\..*norm\.weight", tensor=0),  # used whole
    rule(r"embed\.weight", tensor=1),
    rule(r"layers\.1\.attention\.[kv]\.weight", tensor=1),
    rule(r"head\.proj\.weight"),
]

PLANS = {
    "tensor": {"tensor": 2, "rules": TENSOR},
    "tensor, shared heads": {"tensor": 4, "rules": TENSOR},
    "shard, dim 1": {"shard": 2, "rules": [rule(r".*(q|k|up|down|proj)\.weight", shard=1)]},
    "shard, kept": {"shard": 2},
    "hybrid, kept": {"replicate": 2, "shard": 2, "fsdp": {"strategy": "hybrid_shard"}},
    "tensor and shard": {
        "tensor": 2,
        "shard": 2,
        "rules": [rule(r".*\.1\.mlp\.down\.weight", tensor=1, shard=1), *TENSOR],
    },
    "tensor and shard, kept": {"tensor": 2, "shard": 2},
    "pipeline and shard, kept": {"pipeline": 2, "shard": 2},
    "tensor and replicate, kept": {"tensor": 2, "replicate": 2},
    "context, kept": {"context": 2},
}
IN_EVERY_RUN = "tensor and shard", "pipeline and shard, kept"


def curves_and_places(recipe):
    """Return losses, gradient norms, and which dims of each parameter of this rank are cut."""
    parts = assembled(recipe)
    places = {name: dims_cut(weight) for name, weight in parts.model.named_parameters()}
    return train(parts), places


def dims_cut(weight):
    found = {"shard": None, "tensor": None}
    if isinstance(weight, DTensor):
        axes = weight.device_mesh.mesh_dim_names
        for axis, placement in zip(axes, weight.placements, strict=True):
            if not placement.is_replicate() and weight.device_mesh[axis].size() > 1:
                found[axis] = placement.dim
    return found


@pytest.mark.parametrize("plan", quick(PLANS, *IN_EVERY_RUN))
def test_weights_lie_as_told_and_the_curves_are_those_of_one_process(plan):
    parallel = {"shard": 1, "rules": KEPT} | PLANS[plan]
    degrees = Degrees(**{axis: size for axis, size in parallel.items() if isinstance(size, int)})
    recipe = recipe_with(parallel=parallel)
    told = {each.name: each.place for each in placements(recipe, degrees, 257)}
    expected = curves_of_one_process("{}")
    for (losses, norms), places in run_ranks(degrees.world, curves_and_places, recipe, timeout=300):
        assert losses == pytest.approx(expected[0], abs=1e-5, rel=1e-5)
        assert norms == pytest.approx(expected[1], abs=1e-5, rel=1e-5)
        assert places == {name: told[name] for name in places}


def test_validation_loss_and_adamw():
    """Kept weights are updated, averaged and evaluated beside the others."""
    optimizer = {"name": "adamw", "lr": 3e-3}
    parallel = {"tensor": 2, "shard": 2, "rules": KEPT}
    assert_same(4, alone, parallel=parallel, optimizer=optimizer, ema={"decay": 0.5})


@pytest.mark.matrix
@pytest.mark.parametrize("others", [{"tensor": 2, "rules": TENSOR}, {"rules": KEPT}])
def test_compiled_and_recomputed_blocks(others):
    """Each weight is compared: a lost gradient may hardly show in the loss."""
    expected = run_ranks(1, weights, recipe_with())[0]
    changes = {"compile": {"enabled": True, "backend": "aot_eager"}}
    for change in (changes, {"memory": {"recompute": "full"}}):
        (found, *_) = run_ranks(2, weights, recipe_with(parallel=others, **change), timeout=240)
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert found[name] == pytest.approx(weight, abs=1e-5, rel=1e-5), name


def test_rules_that_the_real_parameters_cannot_follow_are_refused():
    """Also where a recipe was not validated, and a config does not know its parameters."""
    recipe = recipe_with(
        parallel={"tensor": 2, "rules": [rule("embed.weight", tensor=0), rule("embed.weight")]}
    )
    for message, hint in run_ranks(2, refusal, recipe):
        assert message == '"embed.weight" matches only parameters that earlier rules took'
        assert hint == "put it before them"


def refusal(recipe):
    try:
        assembled(recipe)
    except RecipeError as error:
        return error.problems[0].message, error.problems[0].hint
    return "", ""


def test_a_checkpoint_saved_under_rules_resumes_without_them(tmp_path):
    settings = ["schedule.name=constant", "optimizer.lr=1e-3", "schedule.warmup_steps=0"]
    settings += ["precision.compute=fp32", "evaluate.interval=0"]
    under_rules = ["parallel.mesh=fsdp:2,tp:2", *rule_settings(KEPT[:1] + TENSOR[1:3])]
    expected = tmp_path / "expected"
    assert finish(start(write_recipe(expected, 4), 1, 0, settings), 120) == [0]
    folder = tmp_path / "found"
    recipe = write_recipe(folder, 4)
    for attempt, (world, changes) in enumerate([(4, under_rules), (1, []), (4, under_rules)]):
        steps = f"run.steps={attempt + 2}"
        processes = start(recipe, world, attempt, [*settings, steps, *changes])
        assert finish(processes, 240) == [0] * world, complaints(recipe)
    losses = [row["loss"] for row in rows(folder)]
    assert losses == pytest.approx([row["loss"] for row in rows(expected)], abs=1e-5)


def rule_settings(rules):
    for index, each in enumerate(rules):
        yield f"parallel.rules.{index}.match='{each['match']}'"
        dims = ", ".join(f"{axis} = {dim}" for axis, dim in each["place"].items())
        yield f"parallel.rules.{index}.place={{ {dims} }}"
