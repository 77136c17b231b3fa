"""Steps on local shards give the bits and the state that steps on DTensors give."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.distributed import run_ranks
from trainer.engine.core.local import local, sum_over_shards
from trainer.engine.optim.elementwise.tables import (
    ADOPT,
    MARS,
    QHADOPT,
    AdEMAMix,
    DecoupledSGDW,
    Lion,
    QHAdam,
    ScheduleFree,
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
    ScheduleFree(),
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


def sharded_norms():
    """Return the norms of a weight that two ranks share, and of one that each rank has whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(2, 5))
    fully_shard(model[0], mesh=mesh)
    tensors = list(model.parameters())
    with torch.no_grad():
        squares = [local(weight.fill_(2.0)).square().sum() for weight in tensors]
    return [value.item() for value in sum_over_shards(tensors, squares)]


def test_values_are_summed_over_the_ranks_of_different_shards_alone():
    assert all(found == [48.0, 12.0, 40.0, 20.0] for found in run_ranks(4, sharded_norms))


def mars_steps(size):
    """Return the weights after three steps with gradients whose norms are above and below 1."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    if size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    config = MARS(lr=0.1)
    groups = [{"params": list(model.parameters()), "peak_lr": config.lr}]
    step = undecorated_step(config.build(groups, torch.device("cpu")))
    for scale in (0.1, 5.0, 1.0):
        for weight in model.parameters():
            full = torch.linspace(-1, 1, weight.numel()).view(weight.shape) * scale
            weight.grad = distribute_like(weight, full)
        step()
    whole = (w.full_tensor() if isinstance(w, DTensor) else w for w in model.parameters())
    return [weight.tolist() for weight in whole]


def distribute_like(weight, full):
    if not isinstance(weight, DTensor):
        return full
    return distribute_tensor(full, weight.device_mesh, weight.placements)


def test_mars_takes_the_norm_of_the_whole_weight():
    (alone,), (sharded, other) = run_ranks(1, mars_steps, 1), run_ranks(2, mars_steps, 2)
    assert sharded == other
    for found, expected in zip(sharded, alone, strict=True):
        assert torch.tensor(found) == pytest.approx(torch.tensor(expected), rel=1e-6)


def describe(value):
    if not isinstance(value, DTensor):
        return value.tolist() if isinstance(value, torch.Tensor) else value
    return str(value.placements), value.stride(), value.full_tensor().tolist()


@pytest.mark.parametrize("config", OPTIMIZERS, ids=lambda config: config.name)
def test_bits_and_state_are_those_of_dtensors(config):
    found, expected = (run_ranks(4, sharded_steps, config, on) for on in (True, False))
    assert found == expected
    keys = {"decoupled_sgdw": "momentum_buffer", "sgd": "momentum_buffer", "schedule_free": "z"}
    state = found[0]["weight", keys.get(config.name, "exp_avg")]
    assert "Shard(dim=0)" in state[0]
