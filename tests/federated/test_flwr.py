"""Server optimizers and merges against flwr's strategies, an independent implementation.

`make_flwr_vectors.py` has recorded what flwr makes of given clients; the versions are in the file.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.engine.federated.merge.geometry import Geometry
from trainer.engine.federated.tables import merges, server_optimizers

RECORDED = json.loads((Path(__file__).parent / "flwr_vectors.json").read_text())
START, MOVES = np.array(RECORDED["start"]), np.array(RECORDED["moves"])
ADAPTIVE = RECORDED["adaptive"]
BETAS = [ADAPTIVE["beta_1"], ADAPTIVE["beta_2"]]
GEOMETRY = Geometry({"w": torch.zeros(len(START))}, 1, torch.device("cpu"))


def adam_rate(number):
    """Return flwr's rate of a round: the bias correction of a round later than the paper's."""
    first, second = BETAS
    return ADAPTIVE["eta"] * np.sqrt(1 - second ** (number + 1)) / (1 - first ** (number + 1))


@pytest.mark.parametrize(
    ("name", "keys", "rate"),
    [
        ("fedavg", {}, lambda number: 1.0),
        ("fedavgm", {"momentum": 0.9}, lambda number: 0.7),
        ("fedadam", {"betas": BETAS, "tau": ADAPTIVE["tau"]}, adam_rate),
        ("fedyogi", {"betas": BETAS, "tau": ADAPTIVE["tau"]}, lambda number: ADAPTIVE["eta"]),
    ],
)
def test_server_optimizers_equal_flwrs(name, keys, rate):
    weight = torch.from_numpy(START.copy())
    config, state = server_optimizers[name].model_validate({"name": name, **keys}), None
    for number, (moves, expected) in enumerate(
        zip(MOVES, RECORDED["weights"][name], strict=True), 1
    ):
        config = config.model_copy(update={"lr": rate(number)})
        state = state or config.begin(weight)
        mean = np.average(moves, axis=0, weights=RECORDED["counts"])
        config.update(weight, torch.from_numpy(-mean), state, number)
        # flwr computes in fp32, and its weights are of about 1.
        np.testing.assert_allclose(weight.numpy(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "keys"), [("median", {}), ("trimmed_mean", {"trim": 0.2}), ("krum", {"faulty": 1})]
)
def test_merges_equal_flwrs(name, keys):
    weight, rule = START.copy(), merges[name].model_validate({"name": name, **keys}).build()
    for moves, expected in zip(MOVES, RECORDED["weights"][name], strict=True):
        updates = [{"w": torch.from_numpy(-move)} for move in moves]
        weight = weight - rule.merge(updates, [1.0] * len(updates), GEOMETRY)["w"].numpy()
        np.testing.assert_allclose(weight, expected, rtol=0, atol=2e-6)
        weight = np.array(expected)


def test_fedmom_equals_fednesterov_to_a_trillionth():
    ends = {}
    for name in ("fedmom", "fednesterov"):
        config = server_optimizers[name].model_validate({"name": name, "lr": 0.4, "momentum": 0.9})
        weight = torch.from_numpy(START.copy())
        state = config.begin(weight)
        for number in range(50):
            gradient = torch.from_numpy(-MOVES[number % len(MOVES)].mean(0))
            config.update(weight, gradient, state, number + 1)
        ends[name] = weight.numpy()
    np.testing.assert_allclose(ends["fedmom"], ends["fednesterov"], rtol=0, atol=1e-12)
