"""Optimizers of whole matrices give the weights and the state of one process under every plan."""

import pytest

from tests.distributed import run_ranks
from tests.optim.replay import MODELS, WORLD, replay, resume

OPTIMIZERS = {
    "muon": {"name": "muon", "lr": 0.01, "weight_decay": 0.1},
    "normuon": {"name": "normuon", "lr": 0.01, "weight_decay": 0.1},
    "muonh": {"name": "muonh", "lr": 0.02},
    "adamh": {"name": "adamh", "lr": 0.02},
    "dion2": {"name": "dion2", "lr": 0.01},
    "muonclip": {"name": "muonclip", "lr": 0.01, "by_head": True},
    "soap": {"name": "soap", "lr": 0.01},
    "soap_muon": {"name": "soap_muon", "lr": 0.01, "basis_interval": 7},
}


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_every_plan_gives_the_weights_and_state_of_one_process():
    (alone,) = run_ranks(1, replay, OPTIMIZERS, 50, timeout=300)
    ranks = run_ranks(WORLD, replay, OPTIMIZERS, 50, timeout=1500)
    for name in OPTIMIZERS:
        for model, (_, plans) in MODELS.items():
            expected = alone[name, model, "alone"]
            for plan in plans:
                found = {}
                for rank in ranks:
                    found |= rank[name, model, plan]
                assert found.keys() == expected.keys(), plan
                for key, value in expected.items():
                    assert abs(found[key] - value).max() < 1e-10, (name, model, plan, key)


PAIRS = [
    ("dense", "shard", "hybrid"),
    ("split", "tensor", "pipeline"),
    ("split", "pipeline", "tensor-replicate"),
    ("experts", "expert-tensor", "shard"),
    ("experts", "expert", "expert-tensor"),
]


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_resumed_under_another_plan_the_weights_are_those_of_no_interruption(tmp_path):
    (alone,) = run_ranks(1, replay, OPTIMIZERS, 14, timeout=300)
    ranks = run_ranks(WORLD, resume, OPTIMIZERS, PAIRS, 14, tmp_path, timeout=1500)
    for name in OPTIMIZERS:
        for pair in PAIRS:
            found = {}
            for rank in ranks:
                found |= rank[name, pair]
            expected = alone[name, pair[0], "alone"]
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert abs(found[key] - value).max() < 1e-10, (name, pair, key)
