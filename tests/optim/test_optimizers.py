"""Each optimizer against its paper's update, written out in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from trainer.engine.optim.optimizers import SGD, Adam, AdamW
from trainer.engine.optim.parameters import avoid_dynamo_import, parameter_groups, undecorated_step

STEPS, LR = 5, 0.05
rng = np.random.default_rng(0)
START = rng.normal(size=7)
GRADIENTS = rng.normal(size=(STEPS, 7))


def adam(weight_decay, decoupled, betas=(0.9, 0.95), eps=1e-8):
    """Kingma & Ba 2015, algorithm 1; decoupled: Loshchilov & Hutter 2019, algorithm 2."""
    x, m, v = START.copy(), np.zeros(7), np.zeros(7)
    for step, gradient in enumerate(GRADIENTS, 1):
        g = gradient if decoupled else gradient + weight_decay * x
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        if decoupled:
            x = x - LR * weight_decay * x
        x = x - LR * (m / (1 - betas[0] ** step)) / (np.sqrt(v / (1 - betas[1] ** step)) + eps)
    return x


def momentum(rate, weight_decay, nesterov):
    """Sutskever et al. 2013 in the form where the rate multiplies the velocity."""
    x, velocity = START.copy(), None
    for gradient in GRADIENTS:
        g = gradient + weight_decay * x
        velocity = g if velocity is None else rate * velocity + g
        x = x - LR * (g + rate * velocity if nesterov else velocity)
    return x


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AdamW(lr=LR, weight_decay=0.3), adam(0.3, decoupled=True)),
        (AdamW(lr=LR, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.0),
         adam(0.0, True, (0.8, 0.99), 1e-3)),
        (Adam(lr=LR, weight_decay=0.3), adam(0.3, decoupled=False)),
        (SGD(lr=LR), momentum(0.0, 0.0, False)),
        (SGD(lr=LR, momentum=0.9, weight_decay=0.1), momentum(0.9, 0.1, False)),
        (SGD(lr=LR, momentum=0.9, nesterov=True), momentum(0.9, 0.0, True)),
    ],
    ids=["adamw", "adamw-other-betas", "adam", "sgd", "sgd-momentum", "sgd-nesterov"],
)  # fmt: skip
def test_updates_equal_the_formula(config, expected):
    weight = nn.Parameter(torch.from_numpy(START.copy()))
    groups = parameter_groups([("weight", weight)], config)
    avoid_dynamo_import()
    optimizer = config.build(groups, torch.device("cpu"))
    step = undecorated_step(optimizer)
    for gradient in GRADIENTS:
        weight.grad = torch.from_numpy(gradient.copy())  # Nesterov adds to it in place
        step()
    assert weight.detach().numpy() == pytest.approx(expected, rel=1e-12)
