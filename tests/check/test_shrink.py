"""A shrunk recipe has the structure of the recipe that it stands for."""

from math import prod
from pathlib import Path

import pytest

import trainer
from trainer.engine.check.adapt import adapt
from trainer.engine.check.check_plan import find_world
from trainer.engine.check.shrink import RANKS, select_axes, shrink, shrink_degrees
from trainer.engine.core.errors import RecipeError
from trainer.engine.parallel.mesh import AXES, EXPERT_AXES, Degrees
from trainer.engine.recipe.checks.checks import check
from trainer.engine.recipe.load import load_recipe
from trainer.engine.recipe.schema import Recipe

SHIPPED = sorted((Path(trainer.__file__).parent / "recipes").glob("*.toml"))
ALL_AXES = (*AXES, *EXPERT_AXES)
FAMILIES = {
    "llama3": {"flavor": "405b"},
    "qwen3": {"flavor": "235b-a22b"},
    "deepseek_v3": {"flavor": "236b"},
    "gpt_oss": {"flavor": "120b"},
    "llama4": {"flavor": "17bx128e"},
    "mistral": {"flavor": "7b-v0.1"},
    "mixtral": {"flavor": "8x22b"},
    "olmo2": {"flavor": "32b"},
    "gemma2": {"flavor": "27b"},
    "gemma3": {"flavor": "27b"},
    "phi3": {"flavor": "4-mini"},
    "qwen2": {"flavor": "72b"},
}


def recipe_of(name, **parallel):
    """Return a large recipe of a family, with a plan."""
    return Recipe.model_validate(
        {
            "run": {"steps": 10, "name": "large"},
            "model": {"name": name, **FAMILIES[name]},
            "data": {"seq_len": 4096, "global_batch": 2**15, "micro_batch": 4},
            "parallel": parallel,
        }
    )


def kinds(model):
    return {model.describe_block(number) for number in range(model.n_layers)}


def ratio(first, second):
    """Return how two counts compare."""
    return (first > second) - (first < second)


def require_same_structure(given, small, before, after):
    """Fail where a shrunk recipe has lost something of the given one."""
    assert [getattr(before, axis) > 1 for axis in ALL_AXES] == [
        getattr(after, axis) > 1 for axis in ALL_AXES
    ]
    assert small.memory.recompute == given.memory.recompute
    assert type(small.model) is type(given.model)
    assert type(small.task) is type(given.task)
    assert small.loss == given.loss
    assert small.data.packing == given.data.packing
    assert bool(small.lora.rank) == bool(given.lora.rank)
    assert small.lora.targets == given.lora.targets
    sharding = given.parallel.fsdp.sharding
    alone = before.replicate == 1 and sharding.needs_replicas
    strategy = sharding.without_replicas if alone else given.parallel.fsdp.strategy
    assert small.parallel.fsdp.strategy == strategy
    assert small.parallel.pipelining.schedule == given.parallel.pipelining.schedule
    old, new = given.model, small.model
    assert new.task_head == old.task_head
    for key in ("tie_embeddings", "attention", "q_lora_rank", "rope_scaling", "window"):
        assert (getattr(new, key, None) is None) == (getattr(old, key, None) is None), key
    assert new.is_tied == old.is_tied
    if not hasattr(old, "n_heads"):
        assert new == old
        return
    assert kinds(new) == kinds(old)
    assert bool(getattr(new, "mtp_depth", 0)) == bool(getattr(old, "mtp_depth", 0))
    if hasattr(old, "n_kv_heads"):
        assert (new.n_kv_heads == 1) == (old.n_kv_heads == 1) or before.tensor > old.n_kv_heads
        assert ratio(new.n_heads, new.n_kv_heads) == ratio(old.n_heads, old.n_kv_heads)
        assert (after.tensor > new.n_kv_heads) == (before.tensor > old.n_kv_heads)
    if getattr(old, "window", None):
        assert (new.window < small.data.seq_len) == (old.window < given.data.seq_len)
    if experts := getattr(old, "moe", None):
        fewer = new.moe
        for key in ("score", "normalize", "scale", "balance_bias", "aux_weight", "aux_scope"):
            assert getattr(fewer, key) == getattr(experts, key), key
        assert fewer.is_grouped == experts.is_grouped
        assert bool(fewer.num_shared) == bool(experts.num_shared)
        assert (fewer.experts_per_token == 1) == (experts.experts_per_token == 1)
        assert ratio(fewer.num_experts, after.expert) == ratio(experts.num_experts, before.expert)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_keep_their_structure_at_every_world_size(
    path, forgotten_plugins, tmp_path
):
    recipe = load_recipe(path).recipe
    adapted, _ = adapt(recipe, tmp_path, as_is=False)
    checked = 0
    for world in (1, 8, 64, 1024):
        try:
            degrees = recipe.parallel.degrees.resolve(world)
        except RecipeError:
            continue  # it fixes degrees that do not divide this one
        if check(recipe, world):
            continue  # its experts or rows do not
        shrunk = shrink(adapted, world)
        require_same_structure(recipe, shrunk.recipe, degrees, shrunk.degrees)
        assert shrunk.degrees.world <= RANKS
        assert not check(shrunk.recipe, shrunk.degrees.world)
        checked += 1
    assert checked >= (1 if recipe.federation else 2)  # a client of the small one has 4 rows


@pytest.mark.parametrize("name", FAMILIES)
def test_large_models_of_each_family_keep_their_structure_under_a_large_plan(name, tmp_path):
    plan = {"replicate": 4, "shard": 16, "context": 2, "tensor": 8}
    plan["pipeline"] = 4
    if getattr(recipe_of(name).model, "moe", None):
        plan["expert"] = 8
    recipe = recipe_of(name, **plan)
    world = recipe.parallel.degrees.world
    shrunk = shrink(adapt(recipe, tmp_path, as_is=False)[0], world)
    require_same_structure(recipe, shrunk.recipe, recipe.parallel.degrees, shrunk.degrees)
    assert not check(shrunk.recipe, shrunk.degrees.world)
    small = shrunk.recipe.model
    assert sum(map(prod, small.with_vocab(320).parameter_shapes().values())) < 200_000


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"shard": 64}, {"shard": 8}),
        ({"replicate": 16, "shard": 8}, {"replicate": 4, "shard": 2}),
        ({"tensor": 3}, {"tensor": 3}),
        ({"pipeline": 16, "shard": 4, "tensor": 8}, {"pipeline": 2, "shard": 2, "tensor": 2}),
        ({"pipeline": 16, "tensor": 2}, {"pipeline": 4, "tensor": 2}),
        ({"shard": 64, "expert": 64}, {"shard": 8, "expert": 8}),
        ({"shard": 64, "expert": 8}, {"shard": 8, "expert": 4}),
        (
            {"pipeline": 16, "shard": 4, "expert": 2, "expert_tensor": 2},
            {"pipeline": 2, "shard": 4, "expert": 2, "expert_tensor": 2},
        ),
        (
            {"pipeline": 2, "replicate": 2, "shard": 2, "context": 2, "tensor": 2},
            {"pipeline": 2, "replicate": 2, "shard": 2, "context": 2, "tensor": 2},
        ),
    ],
)
def test_axes_shrink_to_two_and_the_largest_fills_eight_ranks(given, wanted):
    assert shrink_degrees(Degrees(**given)) == Degrees(**wanted)


def test_a_cut_that_is_written_out_keeps_its_stages_and_blocks(tmp_path):
    recipe = recipe_of(
        "mistral", pipeline=4, shard=8, pipelining={"layers_per_stage": [7, 9, 9, 7]}
    )
    shrunk = shrink(adapt(recipe, tmp_path, as_is=False)[0], 32)
    assert shrunk.degrees == Degrees(pipeline=4, shard=2)
    assert shrunk.recipe.model.n_layers == 32
    assert shrunk.recipe.parallel.pipelining == recipe.parallel.pipelining


def test_rules_that_name_missing_blocks_are_left_out_and_named(tmp_path):
    rules = [{"match": "layers\\.30\\.mlp\\.up\\.weight", "place": {}}]
    shrunk = shrink(adapt(recipe_of("mistral", shard=8, rules=rules), tmp_path, as_is=False)[0], 8)
    assert shrunk.recipe.parallel.rules == []
    assert any("parallel.rules" in note for note in shrunk.notes)


def test_one_axis_alone_is_a_plan_of_its_own(tmp_path):
    plan = {"replicate": 2, "shard": 2, "tensor": 2, "expert": 4}
    recipe = recipe_of("qwen3", **plan, fsdp={"strategy": "hybrid_shard"})
    shrunk = shrink(adapt(recipe, tmp_path, as_is=False)[0], 8)
    worlds = {
        axes: select_axes(shrunk.recipe, shrunk.degrees, axes).parallel.degrees
        for axes in [("shard",), ("tensor",), ("expert",), ("shard", "expert")]
    }
    assert worlds[("tensor",)] == Degrees(tensor=2)
    # Experts need ranks that share them.
    assert worlds[("expert",)].expert == shrunk.degrees.expert
    assert worlds[("expert",)].world >= shrunk.degrees.expert
    assert worlds[("shard", "expert")].shard >= 2


def test_a_world_size_is_found_for_an_open_degree():
    def load(world):
        if world == 8:
            raise RecipeError("8 ranks are too many")
        return world

    recipe = recipe_of("mistral", tensor=1)
    assert find_world(recipe, load) == (4, 4)
    assert find_world(recipe_of("mistral", shard=2, tensor=3), load) == (6, 6)


def test_what_is_replaced_is_named(tmp_path):
    recipe = Recipe.model_validate(
        {
            "run": {"steps": 2, "init_from": "runs/another"},
            "model": {"name": "mixtral", "moe": {"capacity_factor": 1.0, "force_balanced": True}},
            "compile": {"enabled": True},
            "kernels": {"rms_norm": "triton", "linear_cross_entropy": "compiled"},
            "precision": {"float8": {"enabled": True}, "compute": "fp16"},
            "memory": {"optimizer_in_backward": True, "recompute": "budget"},
            "parallel": {"async_tensor": True},
            "data": {"splits": [{"name": n, "sources": [{"name": "python"}]} for n in "ab"]},
        }
    )
    adapted, notes = adapt(recipe, tmp_path, as_is=False)
    text = "\n".join(notes)
    for word in (
        *("capacity_factor", "force_balanced", "compile", "rms_norm", "linear_cross_entropy"),
        *("float8", "optimizer_in_backward", "recompute", "async_tensor", "init_from"),
        *("data", "optimizer: SGD", "splits"),
    ):
        assert word in text, word
    assert adapted.precision.compute == "fp64"
    _, notes = adapt(recipe, tmp_path, as_is=True)
    assert any("float8: emulated" in note for note in notes)
    assert any('"fp16" is bf16' in note for note in notes)
