"""Steps of training in float64 under a plan that splits data, weights and experts, end to end."""

import pytest

from tests.distributed import run_ranks
from tests.train.float64 import in_float64
from tests.train.plans import BASE, assembled, recipe_with, train, whole

EXPERTS = {
    "name": "mixtral",
    "flavor": "debug",
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "moe": {"num_experts": 4, "expert_ffn_dim": 24},
}
PLAN = {"shard": 2, "tensor": 2, "expert": 2, "expert_tensor": 2}
OPTIMIZERS = {
    "muon": {"name": "muon", "lr": 0.01},
    "muon by head": {"name": "muon", "lr": 0.01, "by_head": True},
    "muonclip": {"name": "muonclip", "lr": 0.01, "max_score": 0.05},
    "dion2": {"name": "dion2", "lr": 0.01},
    "soap": {"name": "soap", "lr": 0.003, "basis_interval": 2},
}


def trained(parallel):
    """Return the weights after five steps of each optimizer that this rank has a part of."""
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        run = {**BASE["run"], "steps": 5}
        changes = {"model": EXPERTS, "optimizer": optimizer, "run": run, "parallel": parallel}
        with in_float64():
            parts = assembled(recipe_with(**changes))
            train(parts, 5)
            found[name] = whole(parts.model)
    return found


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_five_steps_give_the_weights_of_one_process():
    (expected,) = run_ranks(1, trained, {}, timeout=300)
    ranks = run_ranks(4, trained, PLAN, timeout=550)
    for name, weights in expected.items():
        for weight, value in weights.items():
            for rank in ranks:
                if weight in rank[name]:
                    error = abs(rank[name][weight] - value).max()
                    assert error < 1e-8, (name, weight, error)
