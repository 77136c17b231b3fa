"""Ranks that share experts train as one process does, with whatever else they share."""

from unittest.mock import patch

import pytest

from tests.distributed import run_ranks
from tests.train.moe_family import BALANCED, layers_of, moe_recipe, trained
from tests.train.plans import assembled, by_one_process
from tests.train.test_balance import GLOBAL, assert_same
from trainer.engine.parallel import collectives, expert

SHARED = {**BALANCED, "num_shared": 1}

PLANS = {
    "expert-2": (2, {"expert": 2}),
    "expert-2-shard-4": (4, {"expert": 2}),
    "expert-4": (4, {"expert": 4}),
    "hybrid": (4, {"expert": 2, "replicate": 2, "fsdp": {"strategy": "hybrid_shard"}}),
    "wider-than-shard": (4, {"expert": 4, "replicate": 2, "fsdp": {"strategy": "hybrid_shard"}}),
    "replicas": (4, {"expert": 2, "fsdp": {"strategy": "no_shard"}}),
    "tensor": (2, {"tensor": 2}),
    "tensor-shard": (4, {"tensor": 2}),
    "within-tensor": (2, {"expert": 2, "tensor": 2}),
    "tensor-expert": (4, {"expert": 2, "tensor": 2}),
    "across-tensor": (4, {"expert": 4, "tensor": 2}),
    "context": (2, {"expert": 2, "context": 2}),
    "pipeline": (4, {"expert": 2, "pipeline": 2}),
    "zero-bubble": (4, {"expert": 2, "pipeline": 2, "pipelining": {"schedule": "ZBVZeroBubble"}}),
    "divided": (2, {"expert_tensor": 2}),
    "divided-tensor": (4, {"expert_tensor": 2, "tensor": 2}),
    "divided-expert": (4, {"expert": 2, "expert_tensor": 2, "tensor": 2}),
    "divided-expert-shard": (8, {"expert": 2, "expert_tensor": 2, "tensor": 2}),
    "divided-pipeline": (4, {"expert_tensor": 2, "pipeline": 2}),
    "pipeline-context-tensor": (8, {"expert": 4, "pipeline": 2, "context": 2, "tensor": 2}),
}
QUICK = {
    ("divided-expert",),
    ("expert-2", "selective"),
}
OTHERS = {
    "global": {"moe": GLOBAL},
    "shared": {"moe": SHARED},
    "recompute": {"memory": {"recompute": "full"}},
    "selective": {"memory": {"recompute": "selective"}},
    "adamw": {"optimizer": {"name": "adamw", "lr": 3e-3, "eps": 1e-4, "clip_norm": 0.5}},
}


def case(*values):
    """Return the arguments of a test, which takes long unless it is one of the quick ones."""
    return pytest.param(*values, marks=() if values in QUICK else pytest.mark.matrix)


@pytest.fixture(scope="module")
def alone():
    return by_one_process(trained, moe_recipe)


@pytest.mark.parametrize("plan", [case(plan) for plan in PLANS])
def test_a_plan_trains_experts_as_one_process_does(plan, alone):
    world, parallel = PLANS[plan]
    changes = {"model": {"n_layers": 4}} if plan == "zero-bubble" else {}
    found = run_ranks(world, trained, moe_recipe(parallel=parallel, **changes), timeout=290)
    assert_same(found, alone(**changes))


@pytest.mark.parametrize(
    ("plan", "others"),
    [
        case(plan, others)
        for plan in ("expert-2", "divided", "tensor-expert", "context")
        for others in OTHERS
    ],
)
def test_settings_change_nothing(plan, others, alone):
    world, parallel = PLANS[plan]
    changes = OTHERS[others]
    found = run_ranks(world, trained, moe_recipe(parallel=parallel, **changes), timeout=290)
    assert_same(found, alone(**{key: value for key, value in changes.items() if key != "memory"}))


REGIONS = 5  # attention, routing, the shared expert, the experts, and the sum: blocks are alike
RECOMPUTED = [
    *(("expert-2", mode) for mode in ("none", "full", "every_n", "selective", "budget")),
    *(("hybrid", mode) for mode in ("none", "selective")),
    *(("within-tensor", mode) for mode in ("none", "full", "selective", "budget")),
    *(("divided", mode) for mode in ("full", "selective")),
    *(("context", "full"), ("pipeline", "selective"), ("zero-bubble", "full")),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("plan", "recompute"), RECOMPUTED)
def test_blocks_compile_around_the_exchange_and_change_nothing(plan, recompute, alone):
    world, parallel = PLANS[plan]
    changes = {"model": {"n_layers": 4}} if plan == "zero-bubble" else {}
    compiled = {"enabled": True, "backend": "aot_eager"}
    memory = {"recompute": recompute}
    recipe = moe_recipe(SHARED, parallel=parallel, memory=memory, compile=compiled, **changes)
    found = run_ranks(world, trained_and_graphs, recipe, timeout=290)
    assert_same([rank for rank, _ in found], alone(moe=SHARED, **changes))
    assert [graphs for _, graphs in found] == [REGIONS] * world


def trained_and_graphs(recipe):
    """Return what `trained` does, and the number of compiled graphs; none may break."""
    from torch._dynamo.utils import counters

    counters.clear()
    found = trained(recipe)
    assert not counters["graph_break"]
    return found, counters["stats"]["unique_graphs"]


def order_of_a_step():
    """Return what happens in a step of one block: rows leave, arrive, and the shared expert."""
    parts, seen = assembled(moe_recipe(SHARED, parallel={"expert": 2}, model={"n_layers": 1})), []
    (layer,) = layers_of(parts)
    layer.shared.register_forward_hook(lambda *_: seen.append("shared"))
    layer.shared.register_full_backward_hook(lambda *_: seen.append("shared, back"))

    def noted(word, function):
        def run(*args):
            seen.append(word)
            return function(*args)

        return run

    noting = {
        "start_all_to_all": noted("leave", collectives.start_all_to_all),
        "wait": noted("arrive", collectives.wait),
    }
    with patch.multiple(collectives, **noting), patch.multiple(expert, **noting):
        parts.step.accumulate(next(parts.loader.steps(0))[:1])
    return seen


def test_shared_experts_compute_while_rows_travel():
    """Counts go first; then rows and their weights, there and back, and so do their gradients."""
    there = ["leave", "arrive", "leave", "leave", "shared", "arrive", "arrive", "leave", "arrive"]
    back = ["leave", "arrive", "leave", "leave", "shared, back", "arrive", "arrive"]
    assert run_ranks(2, order_of_a_step) == [there + back] * 2
