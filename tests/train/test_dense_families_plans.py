"""Dense families under the plans that their own layers could break, in float64.

Ranks of the tensor axis sum the squares of OLMo 2's queries and keys, have parts of Qwen2's biases,
gather what enters a half of a block that has no norm before it, and cap parts of Gemma 2's logits.
Ranks of the context axis cap the scores of the keys of others.
"""

from math import prod
from pathlib import Path

import pytest

from tests.cases import also
from tests.distributed import run_ranks
from tests.train.float64 import in_float64
from tests.train.plans import BASE, assembled, by_one_process, recipe_with, train, whole
from trainer import load_recipe
from trainer.cli.main import _run

RECIPE = Path(__file__).parents[2] / "recipes" / "llama3_debug.toml"

LONGROPE = {
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 4.0, 9.0],
    "use_long": True,
    "original_max_seq_len": 8,
}
SIZES = {**BASE["model"], "init_std": 0.1}
MODELS = {
    "mistral": {"name": "mistral", "window": 5, "head_dim": 12},
    "qwen2": {"name": "qwen2", "tie_embeddings": True},
    "olmo2": {"name": "olmo2"},
    # Caps so low that they bend every score and logit.
    "gemma2": {"name": "gemma2", "window": 5, "attention_softcap": 1.5, "logit_softcap": 0.7},
    "gemma3": {
        "name": "gemma3",
        "window": 5,
        "full_every": 2,
        "local_rope_theta": 100.0,
        "rope_scaling": {"factor": 4.0},
        "head_dim": 12,
    },
    "phi3": {"name": "phi3", "rotary_fraction": 0.75, "rope_scaling": LONGROPE},
}
LORA = {"rank": 3, "alpha": 12.0, "targets": ["*.attention.[qkvo].weight", "*.mlp.*.weight"]}
PLANS = {
    "tensor": {"tensor": 2},
    "shared heads": {"tensor": 4},
    "tensor-shard": {"tensor": 2, "shard": 2},
    "tensor-context": {"tensor": 2, "context": 2},
    "tensor-pipeline": {"tensor": 2, "pipeline": 2},
    "context-pipeline": {"context": 2, "pipeline": 2},
    "ring": {"context": 2, "context_exchange": "ring"},
    "ring-shard": {"context": 2, "context_exchange": "ring", "shard": 2},
    "pipeline": {"pipeline": 2},
    "shard-replicate": {"shard": 2, "replicate": 2},
}

GEMMA_PLANS = [plan for plan in PLANS if plan != "tensor-context"]


def trained(recipe):
    """Return losses, gradient norms, and the weights that this rank has a part of."""
    with in_float64():
        parts = assembled(recipe)
        losses, norms = train(parts, 3)
        return losses, norms, whole(parts.model)


def recipe_of(family, **changes):
    data = {**BASE["data"], "packing": "documents", "micro_batch": 4}
    return recipe_with(model={**SIZES, **MODELS[family]}, data=data, **changes)


@pytest.fixture(scope="module")
def alone():
    return by_one_process(trained, lambda of, **changes: recipe_of(of, **changes))


def assert_same(alone, family, parallel, **changes):
    losses, norms, weights = alone(of=family, **changes)
    found = {}
    world = prod(degree for degree in parallel.values() if isinstance(degree, int))
    for rank in run_ranks(world, trained, recipe_of(family, parallel=parallel, **changes)):
        assert rank[0] == pytest.approx(losses, abs=1e-12)
        assert rank[1] == pytest.approx(norms, abs=1e-12)
        found |= rank[2]
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name] == pytest.approx(weight, abs=1e-12), name


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("olmo2", "tensor"),
        *also(*(("olmo2", plan) for plan in PLANS if plan != "tensor")),
        ("gemma3", "tensor-context"),
        *also(("gemma2", "tensor-context")),
        *also(*((name, plan) for name in ("gemma2", "gemma3") for plan in GEMMA_PLANS)),
        *also(("qwen2", "shared heads"), ("qwen2", "shard-replicate")),
        *also(*((family, "tensor-context") for family in ("mistral", "phi3"))),
        *also(*((family, "context-pipeline") for family in ("mistral", "phi3"))),
    ],
)
def test_every_weight_is_that_of_one_process(family, plan, alone):
    assert_same(alone, family, PLANS[plan])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("olmo2", "shared heads"),
        ("qwen2", "shared heads"),
        ("gemma2", "tensor-context"),
        ("gemma3", "tensor-shard"),
        ("phi3", "tensor-shard"),
        ("mistral", "context-pipeline"),
    ],
)
def test_every_adapter_is_that_of_one_process(family, plan, alone):
    assert_same(alone, family, PLANS[plan], lora=LORA)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["olmo2", "gemma2"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_blocks_are_those_of_one_process(family, recompute, alone):
    assert_same(alone, family, PLANS["tensor-shard"], memory={"recompute": recompute})


@pytest.mark.matrix
def test_the_plan_of_ranks_counts_the_sums_of_squares(capsys):
    def calls(family):
        words = ["model.name=" + family, "parallel.tensor=2", "data.micro_batch=8"]
        given = [word for each in words for word in ("--set", each)]
        assert _run(["plan", str(RECIPE), "--world", "2", *given]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        (count,) = [int(row[-3]) for row in rows if "all-reduce" in row]
        return count

    recipe = load_recipe(RECIPE)
    micro_batches = recipe.data.global_batch // 8
    # Of queries and of keys, forward and backward, in each block.
    assert calls("olmo2") - calls("llama3") == 2 * 2 * recipe.model.n_layers * micro_batches
