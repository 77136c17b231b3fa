"""What saves memory changes no number: recomputation and FSDP's options."""

from inspect import signature
from unittest.mock import patch

import pytest
import torch

from tests.cases import also, quick
from tests.distributed import run_ranks
from tests.train.outcomes import assert_equal
from tests.train.plans import BASE, assembled, recipe_with, train
from tests.train.processes import complaints, finish, start, tensors, write_recipe
from trainer.engine.estimate.simulate.instrumented import track

SELECTIVE = {"recompute": "selective"}
MODES = {
    "full": {"recompute": "full"},
    "every_n": {"recompute": "every_n"},
    "selective": SELECTIVE,
    "by-name": {"recompute": "selective", "recompute_keep": ["aten.mm.default", "norm"]},
    "every-second": {"recompute": "selective", "recompute_keep": ["half_mm", "attention"]},
    "nothing-kept": {"recompute": "selective", "recompute_keep": []},
}
ONE_BLOCK = BASE["model"] | {"n_layers": 1}
# "selective" computes the activation of feed-forward layers again, and keeps the products.
WIDE = BASE["model"] | {"ffn_dim": 256, "n_layers": 4}
COMPILED = {"enabled": True, "backend": "aot_eager"}
DATA = BASE["data"] | {"packing": "documents"}
SCHEDULES = ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize("attention", ["matmul", *also("sdpa")])
def test_recomputation_changes_no_bit(attention):
    like = {"data": DATA, "kernels": {"attention": attention}}
    assert_equal(1, [like | {"memory": memory} for memory in MODES.values()], like, tolerance=0)


@pytest.mark.parametrize(
    ("mode", "plan"),
    [
        ("selective", {"tensor": 2}),
        ("every_n", {"pipeline": 2, "pipelining": {"schedule": "Interleaved1F1B"}}),
        *also(
            ("selective", {"shard": 2}),
            ("selective", {"context": 2}),
            ("selective", {"pipeline": 2}),
            ("every_n", {"tensor": 2}),
        ),
    ],
)
def test_recomputation_under_plans(mode, plan):
    like = {"data": DATA | {"micro_batch": 2}, "model": BASE["model"] | {"n_layers": 4}}
    assert_equal(2, [like | {"memory": MODES[mode], "parallel": plan}], like)


def test_what_a_recipe_keeps_is_held_and_not_computed_again():
    modes = {"none": {}} | {mode: MODES[mode] for mode in ("full", "every_n", "selective")}
    found = dict(zip(modes, run_ranks(2, held, [*modes.values()], timeout=200)[0], strict=True))
    bytes_held = {mode: size for mode, (size, _) in found.items()}
    assert bytes_held["full"] < bytes_held["every_n"] < bytes_held["none"]
    assert bytes_held["full"] < bytes_held["selective"] < bytes_held["none"]
    gathers = {mode: number for mode, (_, number) in found.items()}
    # Two norms of each of four blocks are gathered again.
    assert gathers["selective"] == gathers["none"]
    assert gathers["full"] == gathers["none"] + 8
    assert gathers["every_n"] == gathers["none"] + 4


def held(modes):
    """Return the peak of memory, and the gathers of a step, for each way to recompute."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = []
    for memory in modes:
        recipe = recipe_with(
            memory=memory,
            model=WIDE,
            parallel={"tensor": 2},
            data=DATA | {"micro_batch": 8},
        )
        parts = assembled(recipe)
        peak = (
            track(
                parts.step, lambda batch, _: batch, recipe.data, recipe.model.layout.blocks, steps=2
            )
            .peak()
            .total
        )
        with CommDebugMode() as counted:
            parts.step.accumulate(next(parts.loader.steps(0)))
        gathers = [n for name, n in counted.get_comm_counts().items() if "all_gather" in str(name)]
        found.append((peak, sum(gathers)))
    return found


@pytest.mark.matrix
def test_compiled_blocks_that_recompute_change_no_weight():
    changes = [{"memory": MODES[mode], "compile": COMPILED} for mode in ("full", "selective")]
    changes.append({"memory": {"recompute": "budget"}, "compile": COMPILED})
    assert_equal(1, changes, {})


@pytest.mark.matrix
def test_compiled_blocks_of_split_weights_recompute():
    plan = {"parallel": {"tensor": 2}, "compile": COMPILED}
    modes = [MODES["full"], SELECTIVE, {"recompute": "budget"}]
    assert_equal(2, [plan | {"memory": mode} for mode in modes], {})


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_split_passes_read_what_selective_recomputation_keeps(schedule):
    plan = {"pipeline": 2, "pipelining": {"schedule": schedule}}
    like = {"data": DATA, "model": BASE["model"] | {"n_layers": 4}}
    modes = [SELECTIVE, MODES["every-second"], MODES["nothing-kept"]]
    assert_equal(2, [like | {"parallel": plan, "memory": mode} for mode in modes], like)


@pytest.mark.matrix
@pytest.mark.parametrize("others", [{}, {"shard": 2}, {"tensor": 2}])
@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_split_passes_of_compiled_blocks(schedule, others):
    plan = {"pipeline": 2, "pipelining": {"schedule": schedule}, **others}
    like = {"data": DATA, "model": BASE["model"] | {"n_layers": 4}}
    modes = [{}, MODES["full"], SELECTIVE] + [{"recompute": "budget"}] * (not others)
    recipes = [like | {"parallel": plan, "memory": mode, "compile": COMPILED} for mode in modes]
    assert_equal(4 if others else 2, recipes, like)


@pytest.mark.matrix
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_budget_bounds_what_a_compiled_block_keeps_in_its_own_run_alone(tensor):
    budgets = [0.0, 1.0, None, 0.5]
    for found in run_ranks(tensor, kept_within, budgets, tensor, timeout=300):
        none, everything, unbound, half = found
        assert none < half <= everything == unbound


def kept_within(budgets, tensor):
    """Return the bytes that a run's compiled blocks keep, for runs one after the other."""
    import torch._functorch.config as config

    found = []
    for budget in budgets:
        memory = {} if budget is None else {"recompute": "budget", "recompute_budget": budget}
        plan = {"parallel": {"tensor": tensor}, "compile": COMPILED, "model": ONE_BLOCK}
        parts = assembled(recipe_with(memory=memory, **plan))
        sizes = {}

        def note(tensor, sizes=sizes):
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            parts.step.accumulate(next(parts.loader.steps(0))[:1])
        found.append(sum(sizes.values()))
        assert config.activation_memory_budget == 1.0
    return found


@pytest.mark.matrix
def test_names_of_a_compiled_run_are_plain(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=2)
    compiled = ["compile.enabled=true", "compile.backend=eager", "memory.recompute=full"]
    compiled.append("schedule.warmup_steps=0")
    assert finish(start(recipe, overrides=compiled), timeout=120) == [0], complaints(recipe)
    _, names = tensors(tmp_path / "run")
    assert "model.layers.0.mlp.up.weight" in names
    assert not [name for name in names if "_orig_mod" in name]


def test_options_of_fsdp_change_no_weight():
    each = {"reduce_every": "micro_batch"}
    plans = [
        {"shard": 2, "fsdp": {"prefetch": 2}},
        {"pipeline": 2, "fsdp": {"prefetch": 1}},
        {"shard": 2, "fsdp": each},
        {"context": 2, "fsdp": each | {"offload": True}},
    ]
    assert_equal(2, [{"data": DATA, "parallel": plan} for plan in plans], {"data": DATA})


@pytest.mark.matrix
def test_options_of_fsdp_on_two_axes_change_no_weight():
    each = {"reduce_every": "micro_batch"}
    hybrid = each | {"strategy": "hybrid_shard", "prefetch": 1}
    plans = [
        {"replicate": 2, "shard": 2, "fsdp": hybrid},
        {"tensor": 2, "replicate": 2, "shard": 1, "fsdp": each},
        {"pipeline": 2, "shard": 2, "fsdp": {"prefetch": 2}},
    ]
    assert_equal(4, [{"data": DATA, "parallel": plan} for plan in plans], {"data": DATA})


@pytest.mark.parametrize("schedule", quick(SCHEDULES, "1F1B"))
def test_gradients_of_each_micro_batch_are_reduced_in_a_pipeline(schedule):
    """Also with copies, over which sums are taken once, and with experts."""
    each = {"reduce_every": "micro_batch"}
    pipeline = {"pipeline": 2, "pipelining": {"schedule": schedule}}
    like = {"data": DATA, "model": BASE["model"] | {"n_layers": 4}}
    plans = [{"shard": 2, "fsdp": each}, {"replicate": 2, "shard": 1, "fsdp": each}]
    assert_equal(4, [like | {"parallel": pipeline | plan} for plan in plans], like)
    if schedule == "ZBVZeroBubble":
        hybrid = {"replicate": 2, "shard": 2, "fsdp": each | {"strategy": "hybrid_shard"}}
        assert_equal(8, [like | {"parallel": pipeline | hybrid}], like)


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_split_passes_reduce_often_in_a_lower_dtype_too(schedule):
    plan = {"pipeline": 2, "shard": 2, "pipelining": {"schedule": schedule}}
    model = BASE["model"] | {"n_layers": 4}
    recipes = [
        recipe_with(
            data=DATA,
            model=model,
            precision={"compute": "bf16"},
            parallel=plan | {"fsdp": {"reduce_every": each}},
        )
        for each in ("step", "micro_batch")
    ]
    for once, often in run_ranks(4, losses_and_norms, recipes):
        # Sums of the same gradients in another order.
        torch.testing.assert_close(often, once, rtol=1e-2, atol=0)


def losses_and_norms(recipes):
    return [torch.tensor(train(assembled(recipe))) for recipe in recipes]


def test_a_pipeline_holds_shards_of_gradients_between_micro_batches():
    recipes = [
        recipe_with(data=DATA, parallel={"pipeline": 2, "shard": 2, "fsdp": {"reduce_every": each}})
        for each in ("step", "micro_batch")
    ]
    for once, often in run_ranks(4, reductions, recipes):
        assert once > 0
        assert often == once * 4, "a rank's 4 rows are 4 micro batches"


def reductions(recipes):
    """Return how often FSDP reduces gradients in a step of each recipe."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    found = []
    for recipe in recipes:
        parts = assembled(recipe)
        with patch.object(groups, "foreach_reduce", wraps=groups.foreach_reduce) as reduce:
            parts.step.accumulate(next(parts.loader.steps(0)))
        found.append(reduce.call_count)
    return found


def test_what_the_options_of_fsdp_do():
    options = [{}, {"reduce_every": "micro_batch"}, {"prefetch": 1}]
    plain, each, ahead = run_ranks(4, observed, options, timeout=200)[0]
    units, micro_batches = 4, 2  # two blocks, the head, the embedding
    assert plain == (units, units, ["", "", ""], ["", "", ""])
    assert each[:2] == (units * micro_batches, units), "summed over the copies once"
    assert ahead[2:] == (["layers.1", "head", ""], ["", "layers.0", "layers.1"])


def observed(options):
    """Return reductions of a step, those of them over copies, and what units gather ahead."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    found = []
    for fsdp in options:
        hybrid = {"strategy": "hybrid_shard"} | fsdp
        parts = assembled(recipe_with(parallel={"replicate": 2, "shard": 2, "fsdp": hybrid}))
        with patch.object(groups, "foreach_reduce", wraps=groups.foreach_reduce) as reduce:
            parts.step.accumulate(next(parts.loader.steps(0))[:2])
        bind = signature(collectives.foreach_reduce).bind
        calls = [bind(*call.args, **call.kwargs).arguments for call in reduce.call_args_list]
        over_copies = sum(call["all_reduce_grads"] for call in calls)
        units = {each: parts.model.get_submodule(each) for each in ("layers.0", "layers.1", "head")}
        names = {unit._get_fsdp_state(): name for name, unit in units.items()}
        ahead = [
            [" ".join(names[each] for each in getattr(state, f"_states_to_{way}_prefetch"))
             for state in names]
            for way in ("forward", "backward")
        ]  # fmt: skip
        found.append((reduce.call_count, over_copies, *ahead))
    return found
