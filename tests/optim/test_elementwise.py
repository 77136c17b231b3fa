"""Element-wise optimizers against the update of each paper, computed in float64."""

import json
import math

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch import nn

from tests.cases import also
from tests.commands import run_trainer
from tests.train.processes import newest
from trainer.engine.core.errors import RecipeError
from trainer.engine.optim.elementwise.ademamix import interpolate
from trainer.engine.optim.elementwise.tables import (
    ADOPT,
    MARS,
    QHADOPT,
    AdEMAMix,
    DecoupledAdamW,
    DecoupledSGDW,
    Lion,
    QHAdam,
)
from trainer.engine.optim.optimizers import AdamW
from trainer.engine.optim.parameters import parameter_groups, undecorated_step
from trainer.engine.optim.tables import optimizers
from trainer.engine.recipe.load import load_recipe

STEPS, LR = 6, 0.05
FACTORS = [0.5, 1.0, 1.0, 0.8, 0.4, 0.1]
"""factor of the learning rate at each step"""
rng = np.random.default_rng(0)
START = rng.normal(size=9)
GRADIENTS = rng.normal(size=(STEPS, 9))


def follow(update, decay=0.0, cautious=False):
    """Return the weights after all steps; `update(k, g)` is step k's update, or None for none."""
    x = START.copy()
    for k, g in enumerate(GRADIENTS):
        lr = LR * FACTORS[k]
        u = update(k, g)
        if u is not None:
            shrinks = (u * x > 0) if cautious else 1
            x = x - lr * decay * x * shrinks - lr * u
    return x


def adopt(b1, b2, eps, nu=1.0):
    """Return ADOPT's update with clipping (arXiv:2411.02853); nu as in QHAdam."""
    v, m = np.zeros(9), np.zeros(9)

    def update(k, g):
        nonlocal v, m
        if k == 0:
            v = g**2
            return None
        n = np.clip(g / np.maximum(np.sqrt(v), eps), -(k**0.25), k**0.25)
        m = b1 * m + (1 - b1) * n
        v = b2 * v + (1 - b2) * g**2
        return (1 - nu) * n + nu * m

    return update


def qhadam(b1, b2, n1, n2, eps):
    """Return QHAdam's update (arXiv:1810.06801)."""
    v, m = np.zeros(9), np.zeros(9)

    def update(k, g):
        nonlocal v, m
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        mean, square = m / (1 - b1 ** (k + 1)), v / (1 - b2 ** (k + 1))
        return ((1 - n1) * g + n1 * mean) / (np.sqrt((1 - n2) * g**2 + n2 * square) + eps)

    return update


def lion(b1, b2):
    """Return Lion's update (arXiv:2302.06675, algorithm 2)."""
    m = np.zeros(9)

    def update(k, g):
        nonlocal m
        u = np.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g
        return u

    return update


def ademamix(b1, b2, b3, alpha, warmup, eps):
    """Return AdEMAMix's update (arXiv:2409.03137, algorithm 1, schedules of section 3)."""
    fast, slow, v = np.zeros(9), np.zeros(9), np.zeros(9)

    def update(k, g):
        nonlocal fast, slow, v
        t = k + 1
        a, decay = alpha, b3
        if t < warmup:
            a = t / warmup * alpha
            top = math.log(b1) * math.log(b3)
            bottom = (1 - t / warmup) * math.log(b3) + t / warmup * math.log(b1)
            decay = min(math.exp(top / bottom), b3)
        fast, slow = b1 * fast + (1 - b1) * g, decay * slow + (1 - decay) * g
        v = b2 * v + (1 - b2) * g**2
        return (fast / (1 - b1**t) + a * slow) / (np.sqrt(v / (1 - b2**t)) + eps)

    return update


def mars(b1, b2, gamma, eps):
    """Return the update of MARS-AdamW (arXiv:2411.10438, algorithm 2)."""
    step, last = qhadam(b1, b2, 1.0, 1.0, eps), np.zeros(9)

    def update(k, g):
        nonlocal last
        c = g + gamma * b1 / (1 - b1) * (g - last)
        last = g
        return step(k, c / max(1.0, np.linalg.norm(c)))

    return update


def sgd(momentum, nesterov):
    """Return the update of SGD with momentum, in the form where the rate multiplies it."""
    velocity = np.zeros(9)

    def update(k, g):
        nonlocal velocity
        velocity = momentum * velocity + g
        return g + momentum * velocity if nesterov else velocity

    return update


CASES = {
    "adopt": (ADOPT(weight_decay=0.3), follow(adopt(0.9, 0.9999, 1e-6), 0.3)),
    "qhadopt": (QHADOPT(nu=0.8), follow(adopt(0.999, 0.9999, 1e-6, 0.8), 0.1)),
    "qhadam": (QHAdam(), follow(qhadam(0.995, 0.999, 0.7, 1.0, 1e-8), 0.1)),
    "qhadam-squares": (
        QHAdam(betas=(0.8, 0.9), nus=(0.6, 0.7), weight_decay=0.0, eps=1e-3),
        follow(qhadam(0.8, 0.9, 0.6, 0.7, 1e-3)),
    ),
    "lion": (Lion(weight_decay=0.5), follow(lion(0.9, 0.99), 0.5)),
    "lion-cautious": (
        Lion(weight_decay=0.5, cautious_decay=True),
        follow(lion(0.9, 0.99), 0.5, cautious=True),
    ),
    "ademamix": (AdEMAMix(), follow(ademamix(0.9, 0.999, 0.9999, 5.0, 0, 1e-8), 0.1)),
    "ademamix-warmup": (
        AdEMAMix(slow_beta=0.99, alpha=3.0, slow_warmup_steps=4),
        follow(ademamix(0.9, 0.999, 0.99, 3.0, 4, 1e-8), 0.1),
    ),
    "adamw-cautious": (
        AdamW(weight_decay=0.5, cautious_decay=True),
        follow(qhadam(0.9, 0.95, 1.0, 1.0, 1e-8), 0.5, cautious=True),
    ),
    "mars": (MARS(weight_decay=0.3), follow(mars(0.95, 0.99, 0.025, 1e-8), 0.3)),
    "mars-strong": (
        MARS(betas=(0.8, 0.9), gamma=0.5, eps=1e-3, weight_decay=0.0),
        follow(mars(0.8, 0.9, 0.5, 1e-3)),
    ),
    # The decay of a step is the factor of the schedule times `weight_decay`.
    "decoupled_adamw": (
        DecoupledAdamW(weight_decay=1e-2),
        follow(qhadam(0.9, 0.95, 1.0, 1.0, 1e-8), 1e-2 / LR),
    ),
    "decoupled_sgdw": (
        DecoupledSGDW(weight_decay=1e-2, momentum=0.9, nesterov=True),
        follow(sgd(0.9, nesterov=True), 1e-2 / LR),
    ),
}


def take_steps(config, weight):
    """Update a weight by the gradients, with the rates of the schedule."""
    optimizer = config.build(parameter_groups([("weight", weight)], config), torch.device("cpu"))
    step = undecorated_step(optimizer)
    for factor, gradient in zip(FACTORS, GRADIENTS, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        weight.grad = torch.from_numpy(gradient.copy())
        step()
    return optimizer


@pytest.mark.parametrize(("config", "expected"), CASES.values(), ids=CASES)
def test_updates_equal_the_formula(config, expected):
    weight = nn.Parameter(torch.from_numpy(START.copy()))
    take_steps(config.model_copy(update={"lr": LR}), weight)
    assert weight.detach().numpy() == pytest.approx(expected, rel=1e-12)


def test_mars_equals_another_implementation():
    ours, theirs = (nn.Parameter(torch.from_numpy(START.copy()) / 5) for _ in range(2))
    take_steps(MARS(lr=LR, weight_decay=0.0), ours)
    # It adds eps before it corrects the bias.
    optimizer = pytorch_optimizer.MARS([theirs], lr=LR, optimize_1d=True, eps=1e-12)
    for factor, gradient in zip(FACTORS, GRADIENTS, strict=True):
        optimizer.param_groups[0]["lr"] = LR * factor
        theirs.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    assert ours.detach().numpy() == pytest.approx(theirs.detach().numpy(), rel=1e-6)


def test_cautious_adamw_without_decay_equals_adamw_of_torch():
    cautious, plain = (nn.Parameter(torch.from_numpy(START.copy())) for _ in range(2))
    take_steps(AdamW(lr=LR, weight_decay=0.0, cautious_decay=True), cautious)
    take_steps(AdamW(lr=LR, weight_decay=0.0), plain)
    assert cautious.detach().numpy() == pytest.approx(plain.detach().numpy(), rel=1e-12)


def test_a_warmup_of_the_slow_mean_ends_at_its_values():
    factors = [interpolate(number, 100, 5.0, 0.9, 0.9999) for number in range(1, 101)]
    assert factors == sorted(factors), "both rise"
    assert factors[-1] == (5.0, 0.9999)


RECIPE = """
[run]
name = "few"
dir = "runs"
steps = {steps}

[model]
name = "llama3"
flavor = "debug"

[data]
seq_len = 32
global_batch = 8
micro_batch = 4

[[data.sources]]
name = "synthetic"

[schedule]
name = "constant"

[checkpoint]
interval = 0

[optimizer]
{keys}
"""


def write(folder, keys, steps=10):
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(keys=keys, steps=steps))
    return recipe


def test_a_slow_mean_cannot_begin_at_zero(tmp_path):
    keys = 'name = "ademamix"\nbetas = [0.0, 0.9]\nslow_warmup_steps = 9'
    with pytest.raises(RecipeError, match="above 0") as error:
        load_recipe(write(tmp_path, keys))
    assert "optimizer" in str(error.value)


@pytest.mark.parametrize("name", [name for name in optimizers if not name.startswith("torch.")])
def test_the_default_rate_lowers_the_loss_in_ten_steps(name, tmp_path):
    done = run_trainer("run", write(tmp_path, f'name = "{name}"'), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs/few/metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if row["kind"] == "train"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "name",
    [
        *also("adopt", "soap", "ademamix", "mars", "schedule_free", "torch.NAdam", "torch.Adagrad"),
        *also("soap_muon", "dion2", "muonclip"),
    ],
)
def test_a_resumed_run_makes_the_weights_of_no_interruption(name, tmp_path):
    keys = f'name = "{name}"' + ("\nslow_warmup_steps = 4" if name == "ademamix" else "")
    weights = []
    for folder, stops in {"through": [6], "resumed": [3, 6]}.items():
        (tmp_path / folder).mkdir()
        recipe = write(tmp_path / folder, keys, steps=6)
        for stop in stops:
            words = ["run", recipe, "--set", f"run.steps={stop}", "--set", "parallel.shard=2"]
            done = run_trainer(*words, folder=tmp_path / folder, ranks=2)
            assert done.returncode == 0, done.stderr
        weights.append(newest(tmp_path / folder / "runs/few")[1])
    through, resumed = weights
    assert through.keys() == resumed.keys()
    assert any(name.startswith("optimizer.") for name in through)
    for name, value in through.items():
        assert torch.equal(value, resumed[name]), name
