"""A very small run, and what one step of it computes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.known_bugs.ranks import alone, on_ranks
from trainer.engine.assemble.assemble import assemble
from trainer.engine.launch.environment import World
from trainer.engine.recipe.schema import Recipe

BASE: dict[str, Any] = {
    "run": {"steps": 8, "seed": 3},
    "model": {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 32},
    "data": {
        "seq_len": 16,
        "global_batch": 4,
        "micro_batch": 1,
        "packing": "none",
        "sources": [{"name": "synthetic", "num_documents": 60, "document_tokens": 12}],
    },
    "optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": 0.0},
    "schedule": {"name": "constant"},
    "precision": {"compute": "fp32"},
    "checkpoint": {"interval": 0},
    "evaluate": {"steps": 0, "interval": 0},
    "parallel": {"shard": 1},
}
MOE = {
    "name": "mixtral",
    "dim": 16,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "moe": {"num_experts": 4, "expert_ffn_dim": 8, "aux_weight": 0.1},
}

LATENT = {
    "name": "deepseek_v3",
    "dim": 16,
    "n_layers": 2,
    "n_heads": 4,
    "ffn_dim": 32,
    "kv_lora_rank": 8,
    "rope_head_dim": 4,
    "nope_head_dim": 4,
    "value_head_dim": 4,
    "moe": {"num_experts": 4, "expert_ffn_dim": 8, "num_shared": 1},
}


def recipe_of(**changes: Any) -> Recipe:
    """Return the recipe with some keys of its tables changed; a model by name is given whole."""
    merged = dict(BASE)
    for table, values in changes.items():
        fresh = table == "model" and "name" in values
        joined = values if fresh else {**merged.get(table, {}), **values}
        merged[table] = {key: value for key, value in joined.items() if value is not None}
    return Recipe.model_validate(merged)


_folder = tempfile.TemporaryDirectory(prefix="known-bugs-")


def data_of(name: str, rows: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    """Write records, and return the `[data]` table that reads them."""
    file = Path(_folder.name) / name / "records.jsonl"
    if not file.exists():
        file.parent.mkdir()
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    sources = [{"name": "jsonl", "path": str(file)}]
    table = {"packing": None, "sources": sources, "cache_dir": str(file.parent / "cache")}
    return {**table, **keys}


def assembled(**changes: Any) -> Any:
    """Return the parts of the run on this rank, which is alone outside of `on_ranks`."""
    rank = int(os.environ.get("RANK", 0))
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    place = World(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
    return assemble(recipe_of(**changes), place, torch.device("cpu"))


def whole(tensor: torch.Tensor) -> np.ndarray:
    """Return all of a tensor that ranks may share."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().double().numpy().copy()


def gradients_of(parts: Any) -> dict[str, np.ndarray]:
    """Return the gradients of the parameters that this rank has a part of, whole."""
    named = [(n, w) for n, w in parts.model.named_parameters() if w.requires_grad]
    return {
        name: whole(weight.grad) if weight.grad is not None else np.zeros(weight.shape)
        for name, weight in named
    }


@torch.no_grad()
def enlarge(model: torch.nn.Module) -> None:
    """Make matrices ten times as large, and biases one: initial ones hardly matter to the loss."""
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.fill_(1)
        elif weight.ndim > 1:
            weight.mul_(10)


def first_step(changes: dict[str, Any]) -> dict[str, Any]:
    """Return loss, norm and gradients of the first step on this rank."""
    parts = assembled(**changes)
    enlarge(parts.model)
    found = parts.step.accumulate(next(parts.loader.steps(0)))
    numbers = {"loss": found.loss.item(), "norm": found.norm.item()}
    return {**numbers, "total_loss": found.total_loss.item(), "gradients": gradients_of(parts)}


def assert_equal(found: Any, expected: Any, what: str = "") -> None:
    """Assert that arrays or numbers are equal up to rounding of fp32."""
    found, expected = (
        whole(x) if torch.is_tensor(x) else np.asarray(x, dtype=float) for x in (found, expected)
    )
    assert found.shape == expected.shape, what
    scale = max(float(np.abs(expected).max(initial=0)), 1e-6)
    difference = float(np.abs(found - expected).max(initial=0))
    assert difference <= 1e-4 * scale, f"{what}: {difference / scale:.1e} of {scale:.1e}"


def assert_same_gradients(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that gradients by name are equal."""
    for name, gradient in found.items():
        assert_equal(gradient, expected[name], name)


def assert_first_step_as_alone(world: int, parallel: dict[str, Any], **changes: Any) -> None:
    """Assert that ranks find the loss, the norm and every gradient that one process finds."""
    assert_steps_as_alone(on_ranks(world, first_step, {**changes, "parallel": parallel}), changes)


def assert_steps_as_alone(steps: list[dict[str, Any]], changes: dict[str, Any]) -> None:
    """Assert that what each rank found is what one process finds."""
    expected = alone(first_step, changes)
    seen = set()
    for step in steps:
        assert_same_gradients(step["gradients"], expected["gradients"])
        for number in ("loss", "norm", "total_loss"):
            assert_equal(step[number], expected[number], number)
        seen |= step["gradients"].keys()
    assert seen == expected["gradients"].keys()
