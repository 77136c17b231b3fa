"""What a simulated step sends and computes is what the real step of each rank does."""

import os
from collections import Counter
from functools import cache, partial

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests.cases import quick
from tests.distributed import run_ranks
from tests.estimate.test_memory import PREDICTIONS
from trainer.engine.assemble.build import build_model, build_step
from trainer.engine.core.local import local
from trainer.engine.estimate.plan import store
from trainer.engine.estimate.simulate.build import step_batches
from trainer.engine.estimate.simulate.count import count_step
from trainer.engine.estimate.simulate.extrapolate import count_ranks, smallest_sizes
from trainer.engine.estimate.simulate.sizes import size_of
from trainer.engine.parallel.materialize import materialize
from trainer.engine.parallel.plan import make_plan
from trainer.engine.recipe.placements import placements
from trainer.engine.recipe.schema import Recipe

BASE = {
    "run": {"steps": 20},
    "model": {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64},
    "data": {"seq_len": 32, "global_batch": 4, "micro_batch": 1, "packing": "documents"},
    "precision": {"compute": "bf16"},
}
CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(900)  # simulations keep one core busy, which others may use too
VOCAB = 258
FULL = {"recompute": "full"}
EXPERTS = {
    "name": "qwen3",
    **{key: value for key, value in BASE["model"].items() if key != "ffn_dim"},
    "moe": {"num_experts": 4, "expert_ffn_dim": 24, "force_balanced": True, "aux_weight": 0.01},
}
PLANS = {
    "replicate": ({"replicate": 4, "shard": 1}, {}),
    "replicate in bf16": (
        {"replicate": 4, "shard": 1},
        {"precision": {"compute": "bf16", "parameters": "bf16"}},
    ),
    "replicate-shard": ({"replicate": 2, "shard": 2}, {}),
    "tensor-shard": ({"tensor": 2, "shard": 2}, {"memory": FULL}),
    "context-tensor": ({"context": 2, "tensor": 2}, {"memory": FULL}),
    "pipeline-shard": ({"pipeline": 2, "shard": 2}, {"memory": FULL}),
    "pipeline-tensor": (
        {"pipeline": 2, "tensor": 2, "pipelining": {"schedule": "Interleaved1F1B"}},
        {"model": {**BASE["model"], "n_layers": 4}},
    ),
    "pairs": ({"fsdp": {"reshard_after_forward": 2, "ignored": ["*.up.weight", "*norm*"]}}, {}),
    "expert-shard": ({"expert": 2}, {"model": EXPERTS, "memory": FULL}),
    "expert-tensor": ({"expert": 4, "tensor": 2}, {"model": EXPERTS}),
    "expert-divided": (
        {"expert": 2, "expert_tensor": 2, "tensor": 2},
        {"model": EXPERTS, "data": BASE["data"] | {"micro_batch": 2}},
    ),
    "predictions-pipeline": (
        {"pipeline": 2, "shard": 2},
        {"model": PREDICTIONS | {"mtp_depth": 2}},
    ),
    "expert-pipeline": ({"expert": 2, "pipeline": 2}, {"model": EXPERTS}),
}
CASES = quick(PLANS, "expert-divided")


def recipe_of(plan):
    parallel, changes = PLANS[plan]
    return Recipe.model_validate({**BASE, "parallel": parallel, **changes})


def counted(name):
    """Return what real steps of this rank need."""
    rank, recipe = int(os.environ["RANK"]), recipe_of(name)
    plan = make_plan(recipe.parallel, rank, 4, CPU)
    built = build_model(recipe, VOCAB, CPU, plan)
    materialize(built.model, CPU, 0)
    step = build_step(recipe, built, plan)
    # Ranks agree on sizes before the first, and on DDP's buckets before the second.
    for _ in range(3 if name.startswith("replicate") else 2):
        counts = count_step(step, step_batches(recipe.data, step, plan), rank)
    shapes = {key: tuple(local(weight).shape) for key, weight in model_of(step)}
    return counts, shapes, torch_counts(step, recipe, plan, name)


def model_of(step):
    return step.parallel_model.model.named_parameters()


def torch_counts(step, recipe, plan, name):
    """Return how often torch's own mode sees each collective, in a plan that it can watch."""
    if name != "replicate-shard":
        return {}
    with CommDebugMode() as mode:
        step.accumulate(step_batches(recipe.data, step, plan))
    return {str(operation): count for operation, count in mode.get_comm_counts().items()}


def simulated(name):
    """Return what simulated steps need, by place."""
    return list(count_ranks(recipe_of(name), 4, VOCAB, on_gpu=False))


@pytest.fixture(scope="module")
def real():
    """A function from a plan to what real steps of its ranks need, counted once."""
    return cache(partial(run_ranks, 4, counted, timeout=500))


@pytest.mark.parametrize("name", CASES)
def test_a_simulated_step_is_the_real_one(name, real):
    (simulations,) = run_ranks(1, simulated, name, timeout=500)
    for rank, (expected, _, _) in enumerate(real(name)):
        assert expected.message_bytes.total() > 0
        assert simulations[rank // (4 // recipe_of(name).parallel.pipeline)] == expected


@pytest.mark.matrix
def test_torch_sees_as_many_collectives(real):
    for counts, _, seen in real("replicate-shard"):
        ours = Counter()
        for route, calls in counts.calls.items():
            ours[route.kind] += calls
        assert seen == {
            "c10d._allgather_base_": ours["all-gather"],
            "c10d._reduce_scatter_base_": ours["reduce-scatter"],
            "c10d.allreduce_": ours["all-reduce"],
        }


@pytest.mark.parametrize("name", CASES)
def test_parameters_lie_where_the_plan_says(name, real):
    recipe = recipe_of(name)
    degrees = recipe.parallel.degrees.resolve(4)
    stored = [store(each, degrees) for each in placements(recipe, degrees, VOCAB)]
    expected = {each.name: each.local_shape for each in stored}
    found = {}
    for place in range(degrees.pipeline):
        found |= real(name)[place * (4 // degrees.pipeline)][1]
    assert found == expected


def counted_by_formula(recompute):
    """Return the operations that a simulation counts, and those of the formula."""
    recipe = Recipe.model_validate(
        {
            **BASE,
            "model": EXPERTS,
            "data": {**BASE["data"], "packing": "concat", "micro_batch": 4},
            "memory": {"recompute": recompute},
        }
    )
    (counts,) = count_ranks(recipe, 1, VOCAB, on_gpu=True)
    tokens = recipe.data.global_batch * recipe.data.seq_len
    formula = recipe.model.with_vocab(VOCAB).flops_per_token(recipe.data.seq_len) * tokens
    return counts.flops["model"], counts.flops["again"], formula


def test_what_experts_compute_again_is_told_from_what_the_formula_counts():
    ((model, again, formula),) = run_ranks(1, counted_by_formula, "none", timeout=300)
    assert model == formula
    ((repeated_model, repeated, _),) = run_ranks(1, counted_by_formula, "full", timeout=300)
    assert repeated_model == formula
    # A forward pass of the blocks, until all is there that the backward pass needs.
    head = 6 * BASE["model"]["dim"] * VOCAB * BASE["data"]["global_batch"] * 32
    assert 0.9 < (repeated - again) / ((formula - head) / 3) < 1


SCALED = {
    "replicate": (2, {"replicate": 2, "shard": 1}, 3, 6, "none", [0]),
    "shard-tensor": (4, {"tensor": 2, "shard": 2}, 3, 6, "full", [0]),
    "pipeline": (8, {"pipeline": 4, "tensor": 2}, 9, 7, "full", [2, 3]),
    "v-shaped": (
        4,
        {"pipeline": 4, "pipelining": {"schedule": "ZBVZeroBubble"}},
        17,
        7,
        "none",
        [0],
    ),
}
"""ranks, degrees, blocks, rows of a step, recomputation, places to compare"""


def scaled_and_whole(name):
    """Return what each place needs, from small simulations and from whole ones."""
    ranks, parallel, blocks, rows, recompute, places = SCALED[name]
    recipe = Recipe.model_validate(
        {
            **BASE,
            "model": {**BASE["model"], "n_layers": blocks},
            "data": {**BASE["data"], "global_batch": rows},
            "parallel": parallel,
            "memory": {"recompute": recompute},
        }
    )
    sizes = smallest_sizes(recipe, size_of(recipe, ranks, VOCAB), VOCAB)
    assert all(sizes), "pipeline, blocks and micro batches are scaled"
    small, whole = (
        count_ranks(recipe, ranks, VOCAB, on_gpu=True, places=places, whole=whole)
        for whole in (False, True)
    )
    return list(zip(small, whole, strict=True))


@pytest.mark.matrix
@pytest.mark.parametrize("name", list(SCALED))
def test_small_simulations_give_what_whole_ones_do(name):
    (found,) = run_ranks(1, scaled_and_whole, name, timeout=500)
    for small, whole in found:
        assert small == whole
