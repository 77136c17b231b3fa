"""Steps on local shards give the bits and the state that steps on DTensors give."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from trainer.engine.optim.elementwise.tables import (
    ADOPT,
    QHADOPT,
    AdEMAMix,
    DecoupledSGDW,
    Lion,
    QHAdam,
)
from trainer.engine.optim.optimizers import SGD, Adam, AdamW
from trainer.engine.optim.parameters import undecorated_step

OPTIMIZERS = [
    AdamW(),
    Adam(weight_decay=0.1),
    SGD(momentum=0.9, nesterov=True),
    ADOPT(),
    QHADOPT(),
    QHAdam(nus=(0.7, 0.8), cautious_decay=True),
    Lion(),
    AdEMAMix(slow_warmup_steps=2),
    DecoupledSGDW(momentum=0.9, nesterov=True),
]


def sharded_steps(config, on_shards):
    """Return weights and optimizer state after three steps, with the placements of each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Linear(4, 3)  # three rows over two ranks: shards of unequal sizes
    model.scale = nn.Parameter(torch.ones(1))  # one rank holds nothing of it
    fully_shard(model, mesh=mesh)
    frozen = nn.Parameter(torch.ones(2))
    groups = [{"params": [*model.parameters(), frozen], "peak_lr": config.lr}]
    optimizer = config.build(groups, torch.device("cpu"))
    step = undecorated_step(optimizer) if on_shards else optimizer.step
    for number in range(3):
        for weight in model.parameters():
            full = torch.linspace(-1, 1, weight.numel()).view(weight.shape) ** (number + 1)
            weight.grad = torch.zeros_like(weight)
            weight.grad.copy_(DTensor.from_local(full, mesh).redistribute(mesh, weight.placements))
        step()
    assert optimizer.param_groups[0]["params"][-1] is frozen
    assert all(weight.to_local().grad is None for weight in model.parameters()), "memory is freed"
    return {
        (name, key): describe(value)
        for name, weight in model.named_parameters()
        for key, value in {"weight": weight, **optimizer.state[weight]}.items()
    }


def describe(value):
    if not isinstance(value, DTensor):
        return value.tolist() if isinstance(value, torch.Tensor) else value
    return str(value.placements), value.stride(), value.full_tensor().tolist()


@pytest.mark.parametrize("config", OPTIMIZERS, ids=lambda config: config.name)
def test_bits_and_state_are_those_of_dtensors(config):
    found, expected = (run_ranks(4, sharded_steps, config, on) for on in (True, False))
    assert found == expected
    state = found[0]["weight", "momentum_buffer" if "sgd" in config.name else "exp_avg"]
    assert "Shard(dim=0)" in state[0]
