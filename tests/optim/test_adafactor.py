"""Adafactor against torch's, and its row and column state under plans and on resume."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.commands import run_trainer
from tests.distributed import run_ranks
from tests.optim.test_elementwise import write
from tests.train.processes import newest
from trainer.engine.optim.factored.tables import Adafactor
from trainer.engine.optim.parameters import parameter_groups, undecorated_step

SHAPES = [(3, 5), (7,), (4, 2, 5), (6, 1)]
CONFIG = Adafactor(lr=0.3, weight_decay=0.1, d=1.5)


def gradient(shape, number):
    size = int(np.prod(shape))
    return torch.sin(torch.arange(size, dtype=torch.float64) * (number + 0.7)).view(shape)


def starts():
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]


def test_updates_are_those_of_torch():
    ours, theirs = ([nn.Parameter(value) for value in starts()] for _ in range(2))
    names = map(str, range(len(ours)))
    groups = parameter_groups(zip(names, ours, strict=True), CONFIG)
    step = undecorated_step(CONFIG.build(groups, torch.device("cpu")))
    keys = CONFIG.model_dump(include={"lr", "weight_decay", "beta2_decay", "eps", "d"})
    expected = torch.optim.Adafactor(theirs, foreach=False, **keys)
    for number in range(5):
        for weight, other in zip(ours, theirs, strict=True):
            weight.grad = gradient(weight.shape, number)
            other.grad = weight.grad.clone()
        step()
        expected.step()
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.detach().numpy() == pytest.approx(wanted.detach().numpy(), rel=1e-12)


def test_defaults_are_those_of_torch():
    optimizer = torch.optim.Adafactor([nn.Parameter(torch.ones(2))])
    wanted = {key: optimizer.defaults[key] for key in ("lr", "weight_decay", "beta2_decay", "d")}
    assert Adafactor().model_dump(include={*wanted}) == wanted
    assert Adafactor().eps == pytest.approx((torch.finfo(torch.float32).eps, 1e-3))


def steps_of_shards(size):
    """Return whole weights and row and column means after three steps on a mesh of two axes."""
    weights = [nn.Parameter(value) for value in starts()]
    model = nn.ParameterList(weights)
    if size > 1:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("shard", "tensor"))
        placed = [[Shard(1)], [Shard(0)], [Shard(2)], [Shard(0)]]
        for index, places in enumerate(placed):
            part = distribute_tensor(weights[index].data, mesh["tensor"], places)
            model[index] = nn.Parameter(part)
        fully_shard(model, mesh=mesh["shard"])  # strided shards where both axes cut rows
    optimizer = CONFIG.build(
        parameter_groups(model.named_parameters(), CONFIG), torch.device("cpu")
    )
    step = undecorated_step(optimizer)
    for number in range(3):
        for weight in model:
            weight.grad = gradient(weight.shape, number)
            if isinstance(weight, DTensor):
                weight.grad = distribute_tensor(
                    weight.grad, weight.device_mesh, weight.placements, src_data_rank=None
                )
        step()
    values = [
        value
        for weight in model
        for value in [weight.detach(), *optimizer.state[weight].values()]
        if isinstance(value, torch.Tensor)
    ]
    return [(v.full_tensor() if isinstance(v, DTensor) else v).numpy() for v in values]


def test_weights_and_state_of_any_placement_are_those_of_one_process():
    (alone,) = run_ranks(1, steps_of_shards, 1)
    assert len(alone) == 4 + 3 * 2 + 1
    for rank in run_ranks(4, steps_of_shards, 4):
        for found, expected in zip(rank, alone, strict=True):
            assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


PLANS = [["--set", "parallel.shard=2"], ["--set", "parallel.tensor=2"], []]


@pytest.mark.matrix
def test_a_run_resumes_under_any_plan(tmp_path):
    """To the bit on the same ranks, and to rounding on others."""
    plans = {"through": [PLANS[0]] * 1, "resumed": [PLANS[0]] * 2, "moved": PLANS}
    weights = {}
    for folder, parts in plans.items():
        (tmp_path / folder).mkdir()
        recipe = write(tmp_path / folder, 'name = "adafactor"', steps=6)
        for number, plan in enumerate(parts, 1):
            stop = 6 * number // len(parts)
            words = ["run", recipe, "--set", f"run.steps={stop}", *plan]
            done = run_trainer(*words, folder=tmp_path / folder, ranks=2 if plan else 1)
            assert done.returncode == 0, done.stderr
        weights[folder] = newest(tmp_path / folder / "runs/few")[1]
    through, resumed, moved = weights.values()
    assert any(name.endswith(".rows") for name in through)
    assert (
        through.keys()
        == resumed.keys()
        == moved.keys() | {name for name in through if name.startswith("rng.1.")}
    )
    for name, value in through.items():
        assert torch.equal(value, resumed[name]), name
        if name.startswith(("model.", "optimizer.")):
            # Elements whose gradient is near 0 are rounding: the rest of a tensor is not.
            tolerance = 1e-3 if name.startswith("model.") else 2e-2
            assert (moved[name] - value).norm() < tolerance * value.norm(), name


def test_the_estimate_counts_rows_and_columns(tmp_path):
    sizes = {}
    for name in ("adafactor", "adamw"):
        recipe = write(tmp_path, f'name = "{name}"')
        done = run_trainer("estimate-memory", recipe, "--json", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        sizes[name] = json.loads(done.stdout)["ranks"][0]["at_peak"]
    assert sizes["adamw"]["optimizer"] > 1.9 * sizes["adamw"]["parameters"]
    assert 0 < sizes["adafactor"]["optimizer"] < 0.1 * sizes["adafactor"]["parameters"]
