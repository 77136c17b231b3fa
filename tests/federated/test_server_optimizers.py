"""Each server optimizer against its formula in float64, torch's optimizers, and known mistakes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainer.engine.federated.layers.masks import Masks
from trainer.engine.federated.merge.geometry import Geometry
from trainer.engine.federated.server.server import Server
from trainer.engine.federated.tables import Federation, server_optimizers

ROUNDS = 6
rng = np.random.default_rng(0)
START = rng.normal(size=9)
GRADIENTS = rng.normal(size=(ROUNDS, 9))


def build(name, **keys):
    return server_optimizers[name].model_validate({"name": name, **keys})


def run(config, gradients=GRADIENTS):
    """Apply a server optimizer to pseudo-gradients, and return the weight after each round."""
    weight = torch.from_numpy(START.copy())
    state, found = config.begin(weight), []
    for number, gradient in enumerate(gradients, 1):
        config.update(weight, torch.from_numpy(gradient.copy()), state, number)
        found.append(weight.numpy().copy())
    return np.array(found)


def fedavg(lr):
    return START - lr * np.cumsum(GRADIENTS, axis=0)


def fedavgm(lr, mu):
    x, m, found = START.copy(), np.zeros(9), []
    for g in GRADIENTS:
        m = mu * m + g
        x = x - lr * m
        found.append(x)
    return np.array(found)


def fedmom(lr, mu):
    """Huo et al. 2020, algorithm 3: the momentum is between points without momentum."""
    x, point, found = START.copy(), START.copy(), []
    for g in GRADIENTS:
        new = x - lr * g
        x = new + mu * (new - point)
        point = new
        found.append(x)
    return np.array(found)


def adaptive(lr, betas, tau, yogi=False):
    """Reddi et al. 2020, algorithm 2, of the movement D = -g."""
    x, m, v, found = START.copy(), np.zeros(9), np.zeros(9), []
    for g in GRADIENTS:
        d = -g
        m = betas[0] * m + (1 - betas[0]) * d
        if yogi:
            v = v - (1 - betas[1]) * d**2 * np.sign(v - d**2)
        else:
            v = betas[1] * v + (1 - betas[1]) * d**2
        x = x + lr * m / (np.sqrt(v) + tau)
        found.append(x)
    return np.array(found)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (build("fedavg", lr=0.3), fedavg(0.3)),
        (build("fedavgm", lr=0.3, momentum=0.8), fedavgm(0.3, 0.8)),
        (build("fedmom", lr=0.3, momentum=0.8), fedmom(0.3, 0.8)),
        (build("fednesterov", lr=0.3, momentum=0.8), fedmom(0.3, 0.8)),
        (build("fedadam", lr=0.1, betas=[0.7, 0.9], tau=0.01), adaptive(0.1, (0.7, 0.9), 0.01)),
        (build("fedyogi", lr=0.1, betas=[0.7, 0.9], tau=0.01),
         adaptive(0.1, (0.7, 0.9), 0.01, yogi=True)),
    ],
    ids=["fedavg", "fedavgm", "fedmom", "fednesterov", "fedadam", "fedyogi"],
)  # fmt: skip
def test_updates_equal_the_formula(config, expected):
    np.testing.assert_allclose(run(config), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("config", "build_torch"),
    [
        (build("fedavg", lr=0.3), lambda w: torch.optim.SGD(w, lr=0.3)),
        (build("fedavgm", lr=0.3, momentum=0.8), lambda w: torch.optim.SGD(w, 0.3, momentum=0.8)),
        (build("fednesterov", lr=0.3, momentum=0.8),
         lambda w: torch.optim.SGD(w, 0.3, momentum=0.8, nesterov=True)),
        (build("fedadam", lr=0.1, betas=[0.7, 0.9], tau=0.01, bias_correction="adam"),
         lambda w: torch.optim.Adam(w, 0.1, betas=(0.7, 0.9), eps=0.01)),
    ],
    ids=["fedavg", "fedavgm", "fednesterov", "fedadam"],
)  # fmt: skip
def test_a_pseudo_gradient_is_a_gradient_to_torch(config, build_torch):
    weight = torch.nn.Parameter(torch.from_numpy(START.copy()))
    optimizer = build_torch([weight])
    for gradient, found in zip(GRADIENTS, run(config), strict=True):
        weight.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        np.testing.assert_allclose(found, weight.detach().numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", server_optimizers)
def test_the_server_moves_towards_its_clients(name):
    # With a plus in place of a minus, as in public FedAdam and FedYogi, it would walk away.
    moved = run(build(name), [-np.ones(9)] * ROUNDS)
    assert (np.diff(np.vstack([START, moved]), axis=0) > 0).all()


def test_the_momentum_of_fedmom_starts_at_the_weights():
    # From zeros, a first round without a movement would multiply the weights by 1 + momentum.
    np.testing.assert_array_equal(run(build("fedmom"), [np.zeros(9)])[0], START)


def test_moments_are_not_confused():
    config = build("fedadam", betas=[0.5, 0.5])
    state = config.begin(weight := torch.zeros(1, dtype=torch.float64))
    config.update(weight, torch.tensor([4.0], dtype=torch.float64), state, 1)
    assert (state["first_moment"].item(), state["second_moment"].item()) == (2.0, 8.0)


def test_default_rates_move_no_weight_by_more_than_a_hundredth_in_the_first_round():
    for name in ("fedadam", "fedyogi"):
        assert np.abs(run(build(name))[0] - START).max() <= 0.01


def serve(updates, weights, name="fedavg", **keys):
    """Return the global weights after a round of clients with these weights."""
    model = {"w": torch.from_numpy(START.copy())}
    table = Federation(clients=len(updates), rounds=1, local_steps=1, server=build(name, **keys))
    geometry = Geometry(model, 1, torch.device("cpu"))
    server = Server(table, model, {}, geometry, Masks(table, list(model)))
    for number, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        server.broadcast()
        model["w"].copy_(torch.from_numpy(update))
        server.receive(SimpleNamespace(number=number, error={}), weight)
    server.step(1)
    return server.weights["w"].numpy()


def test_the_mean_is_weighted_and_scales_the_pseudo_gradient():
    # Scaling the averaged weights by the count of clients would shrink them towards zero.
    updates, weights = START + rng.normal(size=(5, 9)), [1.0, 2.0, 3.0, 4.0, 5.0]
    mean = np.average(updates, axis=0, weights=weights)
    np.testing.assert_allclose(serve(updates, weights), mean, rtol=0, atol=1e-12)
    half = START + 0.5 * (mean - START)
    np.testing.assert_allclose(serve(updates, weights, lr=0.5), half, rtol=0, atol=1e-12)


def test_one_client_gives_its_weights_bit_for_bit():
    update = START + rng.normal(size=9) * 1e-3
    assert (serve([update], [7.0]) == update).all()
