"""Weights that FSDP reshards to fewer ranks, or leaves whole, train as in one process."""

from unittest.mock import patch

import pytest

from tests.cases import quick
from tests.distributed import run_ranks
from tests.train.plans import BASE, assembled, by_one_process, recipe_with, train, whole
from tests.train.processes import complaints, finish, rows, start, write_recipe
from trainer.engine.parallel import fsdp
from trainer.engine.parallel.mesh import Degrees
from trainer.engine.recipe.placements import placements

EVERY_STYLE = ["*.mlp.up.weight", "*.down.weight", "*norm.weight", "re:[.]k[.]weight", "embed.*"]
IGNORED = {"ignored": EVERY_STYLE}
TIED = {"model": BASE["model"] | {"tie_embeddings": True}}
UNEVEN = {
    "data": BASE["data"] | {"global_batch": 12},
    "model": BASE["model"] | {"ffn_dim": 66},
}
EXPERTS = {
    "name": "qwen3",
    "flavor": "moe_debug",
    "dim": 32,
    "n_layers": 2,
    "moe": {"num_experts": 4, "expert_ffn_dim": 24},
}
PAIRS = {"reshard_after_forward": 2}

PLANS = {
    "hybrid": ({"replicate": 2, "shard": 2, "fsdp": IGNORED | {"strategy": "hybrid_shard"}}, {}),
    "tensor and shard, shared heads": (
        {"shard": 2, "tensor": 2, "fsdp": IGNORED},
        {"model": BASE["model"] | {"n_kv_heads": 1}},
    ),
    "pipeline and shard, tied": ({"shard": 2, "pipeline": 2, "fsdp": IGNORED}, TIED),
    "context, each micro batch": (
        {"shard": 1, "context": 2, "fsdp": IGNORED | {"reduce_every": "micro_batch"}},
        {},
    ),
    "in backward": (
        {"shard": 2, "fsdp": IGNORED},
        {
            "memory": {"optimizer_in_backward": True},
            "optimizer": BASE["optimizer"] | {"clip_norm": 0},
            "data": BASE["data"] | {"micro_batch": 8},
        },
    ),
    "a rule beside": (
        {
            "shard": 2,
            "tensor": 2,
            "fsdp": {"ignored": ["*.gate.weight", "*.up.weight"]},
            "rules": [{"match": r".*\.gate\.weight", "place": {"tensor": 1}}],
        },
        {},
    ),
    "pairs, ignored": ({"shard": 4, "fsdp": PAIRS | IGNORED}, {}),
    "pairs, hybrid": (
        {"replicate": 2, "shard": 4, "fsdp": PAIRS | {"strategy": "hybrid_shard"}},
        {},
    ),
    "pairs, context and recomputation": (
        {"shard": 2, "context": 2, "fsdp": PAIRS},
        {"memory": {"recompute": "full"}},
    ),
    "threes, uneven": ({"shard": 6, "fsdp": {"reshard_after_forward": 3}}, UNEVEN),
}


def trained(recipe):
    """Return losses, gradient norms and weights."""
    parts = assembled(recipe)
    return train(parts), whole(parts.model)


alone = by_one_process(trained)


def dims_of(model):
    found = {}
    for name, weight in model.named_parameters():
        mesh = weight.device_mesh
        axes = zip(mesh.mesh_dim_names, weight.placements, strict=True)
        cut = {axis: placed.dim for axis, placed in axes if not placed.is_replicate()}
        found[name] = {axis: dim for axis, dim in cut.items() if mesh[axis].size() > 1}
    return found


def trained_and_dims(recipe):
    """Return what `trained` does, where weights lie, and what FSDP2 was told about each unit."""
    with patch.object(fsdp, "fully_shard", wraps=fsdp.fully_shard) as shard:
        parts = assembled(recipe)
    asked = [call.kwargs["reshard_after_forward"] for call in shard.call_args_list]
    return train(parts), whole(parts.model), dims_of(parts.model), asked


@pytest.mark.parametrize("plan", quick(PLANS, "pairs, ignored"))
def test_curves_and_every_weight_are_those_of_one_process(plan):
    parallel, changes = PLANS[plan]
    degrees = Degrees(**{axis: size for axis, size in parallel.items() if isinstance(size, int)})
    recipe = recipe_with(parallel=parallel, **changes)
    told = {each.name: each.place for each in placements(recipe, degrees, 257)}
    curves, weights = alone(**changes)
    pieces, found = recipe.parallel.fsdp.reshard_after_forward, {}
    for ours, theirs, dims, asked in run_ranks(
        degrees.world, trained_and_dims, recipe, timeout=300
    ):
        for got, wanted in zip(ours, curves, strict=True):
            assert got == pytest.approx(wanted, abs=1e-5, rel=1e-5)
        for name, dim_of in dims.items():
            assert dim_of == {axis: dim for axis, dim in told[name].items() if dim is not None}
        assert not pieces or asked == [pieces, pieces, False, False], "two blocks, head, root"
        found |= theirs
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name] == pytest.approx(weight, abs=1e-5, rel=1e-5), name


@pytest.mark.matrix
def test_experts_that_no_axis_divides_can_be_ignored_or_resharded():
    changes = {"model": EXPERTS}
    fsdp = {"ignored": ["*.experts.down", "*.router.*"], "reshard_after_forward": 2}
    curves, weights = alone(**changes)
    recipe = recipe_with(parallel={"shard": 4, "fsdp": fsdp}, **changes)
    for ours, found, *_ in run_ranks(4, trained_and_dims, recipe, timeout=300):
        assert ours[1] == pytest.approx(curves[1], rel=1e-5)
        for name, weight in weights.items():
            assert found[name] == pytest.approx(weight, abs=1e-5, rel=1e-5), name


@pytest.mark.matrix
def test_a_checkpoint_moves_between_plans(tmp_path):
    settings = ["schedule.name=constant", "optimizer.lr=1e-3", "schedule.warmup_steps=0"]
    settings += ["precision.compute=fp32", "evaluate.interval=0"]
    pairs = ["parallel.shard=4", "parallel.fsdp.reshard_after_forward=2"]
    whole = ["parallel.mesh=fsdp:2,tp:2"]
    ignored = [f'parallel.fsdp.ignored=["{EVERY_STYLE[0]}", "*norm.weight", "embed.*"]']
    expected, folder = tmp_path / "expected", tmp_path / "found"
    assert finish(start(write_recipe(expected, 4), 1, 0, settings), 120) == [0]
    recipe = write_recipe(folder, 4)
    plans = [(4, pairs + ignored), (1, []), (4, whole + ignored), (4, pairs)]
    for attempt, (world, changes) in enumerate(plans):
        steps = f"run.steps={attempt + 1}"
        processes = start(recipe, world, attempt, [*settings, steps, *changes])
        assert finish(processes, 240) == [0] * world, complaints(recipe)
    losses = [row["loss"] for row in rows(folder)]
    assert losses == pytest.approx([row["loss"] for row in rows(expected)], abs=1e-5)
