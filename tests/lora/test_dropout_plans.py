"""DoRA and adapters with dropout train the same under every plan, in float64."""

import pytest

from tests.cases import quick
from tests.distributed import run_ranks
from tests.lora.test_experts import trained
from tests.lora.test_plans import BASE
from tests.tasks.test_preference import pairs as pairs
from tests.tasks.test_preference import preferring
from tests.train.plans import by_one_process, recipe_with

TABLES = {
    "dora": {"rank": 3, "alpha": 12.0, "dora": True},
    "dropout": {"rank": 3, "alpha": 12.0, "dropout": 0.3},
    "both": {"rank": 3, "alpha": 12.0, "dropout": 0.3, "dora": True},
}
DENSE = BASE["model"]
LATENT = DENSE | {"name": "deepseek_v3"}
LATENT.pop("n_kv_heads")
DOCUMENTS = {"data": BASE["data"] | {"packing": "documents"}}
COMPILED = {"compile": {"enabled": True, "backend": "aot_eager"}}
PLANS = {
    "replicate": (2, {"parallel": {"replicate": 2, "shard": 1}}),
    "shard": (2, {"parallel": {"shard": 2}}),
    "recomputed": (2, {"parallel": {"shard": 2}, "memory": {"recompute": "full"}}),
    "compiled": (1, COMPILED),
    "tensor": (2, {"parallel": {"tensor": 2}}),
    "tensor, compiled": (2, {"parallel": {"tensor": 2}, **COMPILED}),
    "tensor, shared heads": (4, {"parallel": {"tensor": 4}}),
    "tensor and shard": (4, {"parallel": {"tensor": 2, "shard": 2}}),
    "context": (2, {"parallel": {"context": 2}, **DOCUMENTS}),
    "pipeline, recomputed": (2, {"parallel": {"pipeline": 2}, "memory": {"recompute": "full"}}),
    "pipeline, split backward": (
        2,
        {"parallel": {"pipeline": 2, "pipelining": {"schedule": "ZBVZeroBubble"}}}
        | {"model": DENSE | {"n_layers": 4}},
    ),
    "latent, expert": (2, {"parallel": {"expert": 2}, "model": LATENT}),
    "latent, expert, compiled and selective": (
        2,
        {"parallel": {"expert": 2}, "model": LATENT, "memory": {"recompute": "selective"}}
        | COMPILED,
    ),
    "latent, pipeline, expert, compiled and selective": (
        4,
        {
            "parallel": {"pipeline": 2, "expert": 2},
            "model": LATENT,
            "memory": {"recompute": "selective"},
        }
        | COMPILED,
    ),
    "compiled and recomputed": (
        2,
        {"parallel": {"shard": 2}, "memory": {"recompute": "full"}, **COMPILED},
    ),
    "tensor, compiled and recomputed": (
        2,
        {"parallel": {"tensor": 2}, "memory": {"recompute": "full"}, **COMPILED},
    ),
    "pipeline, compiled and selective": (
        2,
        {"parallel": {"pipeline": 2}, "memory": {"recompute": "selective"}, **COMPILED},
    ),
    "pipeline, tensor, compiled and recomputed": (
        4,
        {"parallel": {"pipeline": 2, "tensor": 2}, "memory": {"recompute": "full"}, **COMPILED},
    ),
    "selective": (2, {"parallel": {"shard": 2}, "memory": {"recompute": "selective"}}),
    "latent, tensor": (2, {"parallel": {"tensor": 2}, "model": LATENT, **DOCUMENTS}),
    "ragged, shard": (2, {"parallel": {"shard": 2}, "data": BASE["data"] | {"packing": "ragged"}}),
    "tensor and shard, by rules": (
        4,
        {
            "parallel": {
                "tensor": 2,
                "shard": 2,
                "rules": [
                    {"match": r".*\.up\.(weight|lora_magnitude)", "place": {}},
                    {"match": r".*\.down\.(weight|lora_a)", "place": {"shard": 1}},
                    {"match": r".*\.down\.lora_magnitude", "place": {"tensor": 0}},
                    {"match": r".*\.q\.weight", "place": {"tensor": 1, "shard": 1}},
                ],
            }
        },
    ),
}
CASES = {f"both, {plan}": ("both", plan) for plan in PLANS}
CASES |= {f"{table}, tensor": (table, "tensor") for table in ("dora", "dropout")}


def recipe_of(table, plan):
    changes = {"lora": TABLES[table], **PLANS[plan][1]}
    return recipe_with(**{**BASE, **changes})


def alone_of(table, plan):
    """Return the recipe of a plan for one process."""
    kept = {key: PLANS[plan][1][key] for key in ("model", "data") if key in PLANS[plan][1]}
    return recipe_with(**{**BASE, "lora": TABLES[table], **kept})


@pytest.fixture(scope="module")
def alone():
    return by_one_process(trained, lambda of: alone_of(*of))


@pytest.mark.parametrize(
    "case",
    quick(
        CASES,
        "both, recomputed",
        "both, context",
    ),
)
def test_a_plan_trains_as_one_process_does(case, alone):
    table, plan = CASES[case]
    world = PLANS[plan][0]
    losses, norms, weights = alone(of=(table, plan))
    found = {}
    for rank in run_ranks(world, trained, recipe_of(table, plan), timeout=240):
        assert rank[0] == pytest.approx(losses, abs=1e-11)
        assert rank[1] == pytest.approx(norms, abs=1e-11)
        found |= rank[2]
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name] == pytest.approx(weight, abs=1e-11), name


@pytest.mark.parametrize("task", ["preference", "masked"])
def test_other_tasks_drop_the_same_on_two_ranks(task, pairs):
    lora = {"lora": {**TABLES["both"], "dropout": 0.4}}
    if task == "preference":
        changes = BASE | preferring(pairs, {"name": "dpo"}) | lora
        changes |= {"parallel": {"context": 2}}
    else:
        changes = BASE | lora | {"task": {"name": "masked_language_modeling"}}
        changes |= {"model": BASE["model"] | {"attention": "bidirectional"}}
        changes |= {"parallel": {"shard": 2}}
    alone = {key: value for key, value in changes.items() if key != "parallel"}
    without = alone | {"lora": TABLES["dora"]}
    (expected,), (other,) = (run_ranks(1, trained, recipe_with(**c)) for c in (alone, without))
    assert expected[1][0] != pytest.approx(other[1][0], abs=1e-6)
    for rank in run_ranks(2, trained, recipe_with(**changes)):
        assert rank[0] == pytest.approx(expected[0], abs=1e-9)
        assert rank[1] == pytest.approx(expected[1], abs=1e-9)
