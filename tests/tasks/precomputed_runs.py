"""Runs that learn from a frozen model or from outputs of it on disk; imports no transformers."""

from pathlib import Path

import torch

from tests.train.plans import BASE, curves, recipe_with
from tests.train.plans import train as train_steps
from trainer.engine.assemble.assemble import assemble
from trainer.engine.inference.precompute import precompute
from trainer.engine.launch.environment import World
from trainer.engine.train.evaluate import validate

CPU = torch.device("cpu")


def preferring(frozen, sources, folder="", packing="none", **changes):
    """Two epochs of pairs in a random order."""
    data = BASE["data"] | {"sources": sources, "global_batch": 4, "micro_batch": 2}
    data["packing"] = packing
    data |= {
        "cache_dir": str(Path(sources[0]["path"]).parent / "cache"),
        "validation_fraction": 0.2,
    }
    task = {"name": "preference", "reference": str(frozen), "precomputed": str(folder or "")}
    given = {"task": task, "loss": {"name": "dpo", "beta": 0.3}, "data": data}
    return recipe_with(**given | changes)


def distilling(frozen, folder="", data=(), **changes):
    loss = {"name": "forward_kl", "temperature": 2.0, "hard_weight": 0.3}
    task = {"name": "distillation", "teacher": str(frozen), "precomputed": str(folder or "")}
    task |= changes.pop("task", {})
    data = BASE["data"] | {"micro_batch": 4} | dict(data)
    return recipe_with(task=task, loss=loss, data=data, **changes)


def curves_of(recipe):
    """Return losses, gradient norms and the final validation loss of this process alone."""
    parts = assemble(recipe, World(), CPU)
    return *train_steps(parts), validate(parts)["loss"]


def write(recipe, **options):
    return precompute(recipe, World(), CPU, **options)


def write_and_train(kinds, plan, frozen, sources, folder):
    """Write outputs under a plan, and train with them under it."""
    pairs = preferring(frozen, sources, folder / "pairs", parallel=plan)
    rows = distilling(frozen, folder / "rows", {"micro_batch": 2}, parallel=plan)
    recipes = [{"pairs": pairs, "rows": rows}[kind] for kind in kinds]
    for recipe in recipes:
        world = World(rank=torch.distributed.get_rank(), world_size=2)
        precompute(recipe, world, CPU, torch.distributed.group.WORLD)
    return [curves(recipe) for recipe in recipes]
