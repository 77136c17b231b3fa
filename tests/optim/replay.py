"""Recorded whole gradients, replayed through an optimizer under parallelism plans of 8 ranks."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from tests.train.float64 import in_float64
from tests.train.plans import assembled, recipe_with
from trainer.engine.assemble.update import build_update
from trainer.engine.checkpoint.manifest import SaveInfo
from trainer.engine.checkpoint.reader import load_state
from trainer.engine.checkpoint.state import model_state
from trainer.engine.checkpoint.store import CheckpointStore
from trainer.engine.core.local import local
from trainer.engine.train.parts import Position
from trainer.engine.train.training_state import TrainingState

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
    "name": "mixtral",
    "flavor": "debug",
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
    gradients = []
    for name, parts in built_with(model, parallel, optimizers):
        weights = dict(parts.model.named_parameters())
        gradients = gradients or [
            {each: placed_like(weight, each, step) for each, weight in weights.items()}
            for step in range(steps)
        ]
        for step, given in enumerate(gradients):
            for each, weight in weights.items():
                weight.grad = given[each].clone()
            record_scores(parts.optimizer, step)
            parts.step.weight_update.apply(1.0 - step / (2 * steps))
            parts.optimizer.zero_grad()
        yield name, state_of(parts.model, parts.optimizer)


def placed_like(weight, name, step):
    """Return the recorded gradient, split as its weight is."""
    full = recorded_gradient(name, weight.shape, step)
    if not hasattr(weight, "placements"):
        return full
    return distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)


def resume(optimizers, pairs, steps, folder):
    """Return weights and state by optimizer and pair, as `replay` does, of runs that change their
    plan after half of the steps.

    Args:
        optimizers: tables of recipes by name.
        pairs: a model, the plan that saves, and the plan that resumes.
        steps: the number of recorded gradients.
        folder: of the checkpoints.
    """
    found, half = {}, steps // 2
    group = dist.group.WORLD if dist.is_initialized() else None

    def store_of(*names):
        path = folder / "-".join(names)
        path.mkdir(exist_ok=True)
        return CheckpointStore(path, mode="sync", keep=1, group=group)

    with in_float64():
        for pair in pairs:
            model, first, second = pair
            for name, parts in built_with(MODELS[model][0], PLANS[first], optimizers):
                for step in range(half):
                    step_with_recorded(parts, step, steps)
                saved = TrainingState(parts, group)
                tensors = {**model_state(parts.model), **saved.tensors()}
                store = store_of(name, *pair)
                store.save(tensors, SaveInfo(step=half, extra=saved.numbers(Position())))
                store.finish()
            for name, parts in built_with(MODELS[model][0], PLANS[second], optimizers):
                latest = store_of(name, *pair).latest()
                prepared = TrainingState(parts, group).prepare(latest.manifest)
                tensors = {**model_state(parts.model), **prepared}
                load_state(latest.path, latest.manifest, tensors, group, parts.model.remote_state)
                for step in range(half, steps):
                    step_with_recorded(parts, step, steps)
                found[name, pair] = state_of(parts.model, parts.optimizer)
    return found


def built_with(model, parallel, optimizers):
    """Yield the parts of a run with each optimizer, and the weights that it starts with; the model
    is the same one.
    """
    changes = {"model": model, "data": DATA, "parallel": parallel, "evaluate": {"interval": 0}}
    parts = assembled(recipe_with(**changes))
    weights = list(parts.model.parameters())
    starts = [local(weight).clone() for weight in weights]
    for name, table in optimizers.items():
        recipe = recipe_with(**changes, optimizer={**table, "clip_norm": 0.0})
        with torch.no_grad():
            for weight, start in zip(weights, starts, strict=True):
                local(weight).copy_(start)
        optimizer, update = build_update(
            recipe, parts.parallel_model, parts.model_config, parts.plan, parts.step.scale
        )
        step = replace(parts.step, optimizer=optimizer, weight_update=update)
        yield name, replace(parts, optimizer=optimizer, step=step, recipe=recipe)


def record_scores(optimizer, step):
    """Let an optimizer find largest scores of which each rank has seen some heads' alone."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for path, found in getattr(optimizer, "_scores", {}).items():
        scores = recorded_gradient(path, found.shape, step).abs() * 100
        # All ranks of a stage differ in their numbers modulo 4.
        seen = torch.arange(len(found)) % 4 == rank % 4
        found.copy_(scores if world == 1 else torch.where(seen, scores, scores - 50))


def step_with_recorded(parts, step, steps):
    for name, weight in parts.model.named_parameters():
        weight.grad = placed_like(weight, name, step)
    record_scores(parts.optimizer, step)
    parts.step.weight_update.apply(1.0 - step / (2 * steps))
    parts.optimizer.zero_grad()


def state_of(model, optimizer):
    """Return weights and state, as far as this rank has parts of them."""
    state = {}
    for each, weight in model.named_parameters():
        for key, value in {"weight": weight, **optimizer.state[weight]}.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[f"{each}.{key}"] = torch.as_tensor(whole).detach().double().numpy().copy()
    return state
