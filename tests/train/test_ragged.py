"""Rows of unequal lengths train as padded ones do: gradients, losses, loads, under every plan."""

import json
from pathlib import Path

import pytest

from tests.cases import also, quick
from tests.distributed import run_ranks
from tests.train.float64 import in_float64
from tests.train.moe_family import BALANCED, layers_of, moe_recipe, trained
from tests.train.plans import BASE, assembled, by_one_process, recipe_with
from tests.train.test_balance import GLOBAL, assert_same
from trainer.engine.launch.environment import World
from trainer.engine.recipe.load import load_recipe
from trainer.engine.run.run import run
from trainer.engine.train.evaluate import validate

SOURCES = [
    {"name": "synthetic", "num_documents": 200, "document_tokens": 20, "seed": 1},
    {"name": "synthetic", "num_documents": 200, "document_tokens": 40, "seed": 2, "weight": 0.5},
]
# Longer than every document, so that each padded row ends with padding.
RECIPES = Path(__file__).parents[2] / "recipes"
DATA = BASE["data"] | {"seq_len": 64, "micro_batch": 3, "sources": SOURCES, "packing": "ragged"}
# Windows and chunks of 8 are shorter than most documents.
FAMILIES = {
    "llama3": {},
    "mixtral": {},
    "qwen3": {"flavor": "moe_debug"},
    "llama4": {"chunk": 8},
    "gpt_oss": {"window": 8},
    "deepseek_v3": {},
    "mistral": {"window": 8},
    "olmo2": {},
    "gemma2": {"window": 8, "attention_softcap": 1.5, "logit_softcap": 0.7},
    "gemma3": {"window": 8, "full_every": 2},
    "phi3": {"rotary_fraction": 0.5},
}


def step_of(recipe):
    """Return a step's numbers, gradients and expert loads, and a validation's, in float64."""
    with in_float64():
        parts = assembled(recipe)
        parts.step.weight_update._clip_norm = 0.0
        gradients = parts.step.accumulate(next(parts.loader.steps(0)))
        numbers = parts.step.metrics(gradients, 0.0)
        values = {name: float(getattr(x, "total", x)) for name, x in numbers.items()}
        weights = {name: w.grad.numpy().copy() for name, w in parts.model.named_parameters()}
        loads = {str(i): x.load_counter.numpy() for i, x in enumerate(layers_of(parts))}
        return values, weights, loads, validate(parts)


def steps_of(recipes):
    return [step_of(recipe) for recipe in recipes]


def assert_padded_and_ragged_agree(recipes, rel=1e-8, absolute=1e-12):
    (padded, ragged) = run_ranks(1, steps_of, recipes)[0]
    for found, expected in zip(ragged, padded, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, abs=absolute, rel=rel), name


@pytest.mark.parametrize("family", quick(FAMILIES, "llama4"))
def test_gradients_are_those_of_padded_rows(family):
    model = {"name": family, "n_layers": 4, **FAMILIES[family]}
    recipes = [recipe_with(model=model, data=DATA | {"packing": p}) for p in ("none", "ragged")]
    assert_padded_and_ragged_agree(recipes)


@pytest.mark.parametrize("moe", [BALANCED, GLOBAL], ids=["sequence", "global"])
def test_the_losses_of_routers_are_those_of_padded_rows(moe):
    recipes = [moe_recipe(moe, data=DATA | {"packing": p}) for p in ("none", "ragged")]
    assert_padded_and_ragged_agree(recipes)


@pytest.mark.parametrize("task", ["token", *also("question", "sequence")])
def test_texts_are_classified_as_padded_ones(task):
    kind = "answering" if task == "question" else "classification"
    words = ["data.micro_batch=3", "data.global_batch=6", "evaluate.steps=3"]
    # Float64 here, in which weights of classes would be too, beside logits in fp32.
    words += ['precision.compute="fp32"', "loss.class_weights=[]", "task.dropout=0.3"]
    recipes = [
        load_recipe(RECIPES / f"{task}_{kind}_debug.toml", [*words, f'data.packing="{p}"']).recipe
        for p in ("none", "ragged")
    ]
    # Heads and criteria round to fp32.
    assert_padded_and_ragged_agree(recipes, rel=1e-5, absolute=1e-9)


@pytest.fixture(scope="module")
def alone():
    return by_one_process(trained, moe_recipe)


PLANS = {
    "replicate": (2, {"replicate": 2, "shard": 1}),
    "shard": (2, {"shard": 2}),
    "expert": (2, {"expert": 2}),
    "expert_tensor": (2, {"expert_tensor": 2}),
    "hybrid": (4, {"replicate": 2, "shard": 2, "fsdp": {"strategy": "hybrid_shard"}}),
}


@pytest.mark.parametrize("plan", quick(PLANS, "shard", "expert"))
def test_a_plan_trains_as_one_process_does(plan, alone):
    world, parallel = PLANS[plan]
    recipe = moe_recipe(GLOBAL, data=DATA, parallel=parallel)
    assert_same(run_ranks(world, trained, recipe, timeout=290), alone(moe=GLOBAL, data=DATA))


@pytest.mark.parametrize(
    "changes",
    [{"data": DATA | {"workers": 1, "micro_batch": 8}}, {"memory": {"recompute": "selective"}}],
    ids=["one micro batch from a worker", "recompute"],
)
def test_settings_change_nothing(changes, alone):
    recipe = moe_recipe(**{"moe": GLOBAL, "data": DATA, **changes})
    assert_same(run_ranks(1, trained, recipe, timeout=290), alone(moe=GLOBAL, data=DATA))


def rows_of(folder, name):
    """Return the losses of training and validation that a run has recorded."""
    rows = [json.loads(line) for line in (Path(folder) / name / "metrics.jsonl").open()]
    return [(row["kind"], row["step"], row["loss"], row.get("grad_norm")) for row in rows]


def run_twice(folder):
    """Run six steps at once, and three and three; return what both have recorded."""
    for name, stops in (("whole", [6]), ("parts", [3, 6])):
        for steps in stops:
            recipe = recipe_with(
                data=DATA,
                run={"steps": steps, "seed": 3, "dir": folder, "name": name},
                metrics={"interval": 1},
                evaluate={"steps": 2, "interval": 2},
                checkpoint={"mode": "sync"},
            )
            assert run(recipe, World(rank=0, world_size=1, local_rank=0, local_world_size=1)) == 0
    return rows_of(folder, "whole"), rows_of(folder, "parts")


def test_a_run_resumes_bit_for_bit(tmp_path):
    whole, parts = run_ranks(1, run_twice, str(tmp_path))[0]
    numbers = [row for row in whole if row[0] in ("train", "eval")]
    assert len(numbers) >= 9
    for row in numbers:
        assert row in parts
