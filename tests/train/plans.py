"""A small run under any plan, and the curves of one process to compare with."""

import os

import pytest
import torch

from tests.distributed import run_ranks
from trainer.engine.assemble.assemble import assemble
from trainer.engine.launch.environment import World
from trainer.engine.recipe.schema import Recipe
from trainer.engine.train.evaluate import validate

STEPS = 2
BASE = {
    "run": {"steps": STEPS, "seed": 3},
    "model": {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64},
    "data": {
        "seq_len": 32,
        "global_batch": 8,
        "micro_batch": 1,
        "sources": [{"name": "synthetic", "num_documents": 300, "document_tokens": 20}],
        "validation_fraction": 0.1,
    },
    # SGD shows a wrong gradient scale, which AdamW hides.
    "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 0.5},
    "schedule": {"name": "constant"},
    "precision": {"compute": "fp32"},
    "evaluate": {"steps": 3},
}


def recipe_with(**changes):
    return Recipe.model_validate(BASE | changes)


def assembled(recipe):
    """Return the parts of a run on this rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    return assemble(recipe, world, torch.device("cpu"))


def train(parts, steps=STEPS):
    """Return losses and gradient norms, as this rank sees them."""
    losses, norms = [], []
    batches = parts.loader.steps(0)
    for step in range(steps or parts.total_steps):
        factor = parts.recipe.schedule.lr_factor(step, parts.total_steps)
        gradients = parts.step.accumulate(next(batches), factor)
        parts.step.update(factor)
        parts.step.clear()
        losses.append(gradients.loss.item())
        norms.append(gradients.norm.item())
    return losses, norms


def curves(recipe):
    """Return losses, gradient norms and the final validation loss."""
    parts = assembled(recipe)
    return *train(parts), validate(parts)["loss"]


def weights(recipe):
    """Return the trained weights that this rank has a part of, whole."""
    parts = assembled(recipe)
    train(parts)
    return whole(parts.model)


def whole(model):
    """Return the weights that this rank has a part of, whole."""
    return {
        name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().numpy()
        for name, weight in model.named_parameters()
    }


def by_one_process(function, make=recipe_with):
    """Return a function from changes of a recipe to what one process finds, computed once each.

    Args:
        function: what the process does, from what `make` returns.
        make: changes of the recipe -> its argument.
    """
    known = {}

    def compute(**changes):
        key = repr(changes)
        if key not in known:
            (known[key],) = run_ranks(1, function, make(**changes))
        return known[key]

    return compute


def assert_same(world, alone, **changes):
    """Compare the curves of ranks with those of one process."""
    expected = alone(**{table: values for table, values in changes.items() if table != "parallel"})
    for result in run_ranks(world, curves, recipe_with(**changes), timeout=300):
        for got, wanted in zip(result, expected, strict=True):
            assert got == pytest.approx(wanted, abs=1e-5, rel=1e-5)


def assert_same_weights(world, alone, **changes):
    """Compare every trained weight of ranks with one process's: a lost gradient hardly shows
    elsewhere.
    """
    expected = alone(**{table: values for table, values in changes.items() if table != "parallel"})
    found = {}
    for part in run_ranks(world, weights, recipe_with(**changes), timeout=300):
        found |= part
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name] == pytest.approx(weight, abs=1e-5, rel=1e-5), name
