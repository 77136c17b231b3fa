"""Recorded whole gradients, replayed through an optimizer under parallelism plans of 8 ranks."""

from __future__ import annotations

import hashlib
import os

import torch
from torch.distributed.tensor import distribute_tensor

from tests.train.float64 import in_float64
from tests.train.plans import assembled, recipe_with

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
                for name, optimizer in optimizers.items():
                    recipe = recipe_with(
                        model=table,
                        data=DATA,
                        optimizer={**optimizer, "clip_norm": 0.0},
                        parallel=PLANS[plan],
                        evaluate={"interval": 0},
                    )
                    found[name, model, plan] = replay_plan(recipe, steps)
    return found


def replay_plan(recipe, steps):
    parts = assembled(recipe)
    model, optimizer = parts.model, parts.optimizer
    for step in range(steps):
        for name, weight in model.named_parameters():
            full = recorded_gradient(name, weight.shape, step)
            if hasattr(weight, "placements"):
                mesh, places = weight.device_mesh, weight.placements
                full = distribute_tensor(full, mesh, places, src_data_rank=None)
            weight.grad = full
        parts.step.update(1.0 - step / (2 * steps))
    state = {}
    for name, weight in model.named_parameters():
        for key, value in {"weight": weight, **optimizer.state[weight]}.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[f"{name}.{key}"] = torch.as_tensor(whole).detach().double().numpy()
    return state
