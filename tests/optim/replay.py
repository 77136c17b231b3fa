"""Recorded whole gradients, replayed through an optimizer under parallelism plans of 8 ranks."""

from __future__ import annotations

import hashlib
import os

import torch
from torch.distributed.tensor import distribute_tensor

from tests.train.float64 import in_float64
from tests.train.plans import assembled, recipe_with
from trainer.engine.assemble.update import build_update
from trainer.engine.core.local import local

WORLD = 8
DATA = {
    "seq_len": 16,
    "global_batch": 8,
    "micro_batch": 1,
    "sources": [{"name": "synthetic", "num_documents": 40, "document_tokens": 20}],
}
# Widths that 8 ranks cannot divide evenly, in both dims.
DENSE = {"dim": 36, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 10, "ffn_dim": 52}
SPLIT = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
EXPERTS = {
    "name": "qwen3",
    "flavor": "moe_debug",
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "moe": {"num_experts": 6, "expert_ffn_dim": 24},
}
PLANS = {
    "alone": {},
    "shard": {"shard": 8},
    "replicate": {"replicate": 8, "shard": 1},
    "hybrid": {"replicate": 2, "shard": 4, "fsdp": {"strategy": "hybrid_shard"}},
    "tensor": {"tensor": 2, "shard": 4},
    "tensor-replicate": {"tensor": 4, "replicate": 2, "shard": 1},
    "context-tensor": {"tensor": 2, "context": 2, "shard": 2},
    "pipeline": {"pipeline": 2, "tensor": 2, "shard": 2},
    "expert": {"expert": 2, "shard": 8},
    "expert-hybrid": {
        "expert": 2,
        "replicate": 2,
        "shard": 4,
        "fsdp": {"strategy": "hybrid_shard"},
    },
    "expert-tensor": {"expert": 2, "expert_tensor": 2, "tensor": 2, "shard": 4},
}
MODELS = {
    "dense": (DENSE, ["shard", "replicate", "hybrid"]),
    "split": (SPLIT, ["tensor", "tensor-replicate", "context-tensor", "pipeline"]),
    "experts": (EXPERTS, ["shard", "expert", "expert-hybrid", "expert-tensor"]),
}


def recorded_gradient(name, shape, step):
    """Return a gradient that depends on the parameter, on its global shape and on the step."""
    seed = int.from_bytes(hashlib.sha256(f"{name}:{step}".encode()).digest()[:4], "little")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def replay(optimizers, steps):
    """Return weights and optimizer state by optimizer, model and plan, as far as this rank has
    parts of them.
    """
    found = {}
    is_alone = int(os.environ["WORLD_SIZE"]) == 1
    with in_float64():
        for model, (table, plans) in MODELS.items():
            for plan in ["alone"] if is_alone else plans:
                for name, state in replay_plan(table, PLANS[plan], optimizers, steps):
                    found[name, model, plan] = state
    return found


def replay_plan(model, parallel, optimizers, steps):
    """Yield weights and state of each optimizer; a model, and gradients, are made once for all."""
    changes = {"model": model, "data": DATA, "parallel": parallel, "evaluate": {"interval": 0}}
    parts = assembled(recipe_with(**changes))
    weights = dict(parts.model.named_parameters())
    starts = {name: local(weight).clone() for name, weight in weights.items()}
    gradients = [
        {name: placed_like(weight, name, step) for name, weight in weights.items()}
        for step in range(steps)
    ]
    for name, table in optimizers.items():
        recipe = recipe_with(**changes, optimizer={**table, "clip_norm": 0.0})
        with torch.no_grad():
            for each, weight in weights.items():
                local(weight).copy_(starts[each])
        optimizer, update = build_update(
            recipe, parts.parallel_model, parts.model_config, parts.plan, parts.step.scale
        )
        for step, given in enumerate(gradients):
            for each, weight in weights.items():
                weight.grad = given[each].clone()
            update.apply(1.0 - step / (2 * steps))
        state = {}
        for each, weight in weights.items():
            for key, value in {"weight": weight, **optimizer.state[weight]}.items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                state[f"{each}.{key}"] = torch.as_tensor(whole).detach().double().numpy().copy()
        yield name, state


def placed_like(weight, name, step):
    """Return the recorded gradient, split as its weight is."""
    full = recorded_gradient(name, weight.shape, step)
    if not hasattr(weight, "placements"):
        return full
    return distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)
