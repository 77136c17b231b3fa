"""Schedule-free AdamW against the paper's formula, and which weights are saved and evaluated."""

import logging
import shutil

import numpy as np
import pytest
import pytorch_optimizer
import torch
from safetensors.torch import load_file
from torch import nn

from tests.commands import run_trainer
from tests.distributed import run_ranks
from tests.optim.test_elementwise import GRADIENTS, LR, START, write
from tests.train.plans import BASE, assembled, recipe_with, train
from tests.train.processes import newest
from trainer.engine.assemble.assemble import assemble
from trainer.engine.core.errors import RecipeError
from trainer.engine.launch.environment import World
from trainer.engine.optim.elementwise.tables import ScheduleFree
from trainer.engine.optim.parameters import parameter_groups, undecorated_step
from trainer.engine.recipe.load import load_recipe
from trainer.engine.train.evaluate import evaluate, validate

FACTORS = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
"""a warmup and a constant rate"""


def formula(b1, b2, eps, decay):
    """Return the trained weights and their average (arXiv:2405.15682, algorithm 1).

    The bias of the mean of squares is corrected in the denominator instead of the rate, as in the
    code of the authors.
    """
    x, z, v, total = START.copy(), START.copy(), np.zeros(9), 0.0
    for k, g in enumerate(GRADIENTS):
        lr = LR * FACTORS[k]
        y = (1 - b1) * z + b1 * x
        v = b2 * v + (1 - b2) * g**2
        z = z - lr * (g / (np.sqrt(v / (1 - b2 ** (k + 1))) + eps) + decay * y)
        total += lr**2
        x = (1 - lr**2 / total) * x + lr**2 / total * z
    return (1 - b1) * z + b1 * x, x


def take_steps(config):
    weight = nn.Parameter(torch.from_numpy(START.copy()))
    optimizer = config.build(parameter_groups([("weight", weight)], config), torch.device("cpu"))
    step = undecorated_step(optimizer)
    for factor, gradient in zip(FACTORS, GRADIENTS, strict=True):
        optimizer.param_groups[0]["lr"] = LR * factor
        weight.grad = torch.from_numpy(gradient.copy())
        step()
    return weight.detach(), optimizer.average(weight)


def test_weights_and_their_average_are_those_of_the_formula():
    config = ScheduleFree(lr=LR, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.2)
    for found, expected in zip(take_steps(config), formula(0.8, 0.95, 1e-3, 0.2), strict=True):
        assert found.numpy() == pytest.approx(expected, rel=1e-12)


def test_weights_are_those_of_another_implementation():
    weight = nn.Parameter(torch.from_numpy(START.copy()))
    keys = {"lr": LR, "betas": (0.9, 0.999), "weight_decay": 0.1}
    optimizer = pytorch_optimizer.ScheduleFreeAdamW([weight], warmup_steps=4, **keys)
    for gradient in GRADIENTS:
        weight.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    trained, average = take_steps(ScheduleFree(**keys))
    assert trained.numpy() == pytest.approx(weight.detach().numpy(), rel=1e-9)
    optimizer.eval()
    assert average.numpy() == pytest.approx(weight.detach().numpy(), rel=1e-9)


OPTIMIZER = {"name": "schedule_free", "lr": 0.01}
DATA = BASE["data"] | {"micro_batch": 4}


def evaluations():
    """Return the loss of a validation, that of the average alone, and whether weights return."""
    parts = assembled(recipe_with(data=DATA, optimizer=OPTIMIZER, ema={"decay": 0.0}))
    train(parts, 3)
    before = [weight.detach().clone() for weight in parts.model.parameters()]
    measured = validate(parts)["loss"]
    weights = list(parts.model.parameters())
    same = all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    with torch.no_grad():
        for weight in weights:
            weight.copy_(parts.optimizer.average(weight))
    task = parts.splits[0].task
    alone = evaluate(
        parts.parallel_model, lambda: parts.validation, task, parts.device, parts.degrees
    )["loss"]
    moved = any(not torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    return measured, alone, same, moved


def test_the_average_is_evaluated_and_training_continues_from_its_own_weights():
    ((measured, alone, same, moved),) = run_ranks(1, evaluations)
    assert measured == alone
    assert same
    assert moved


@pytest.mark.matrix
def test_checkpoints_hold_the_average_as_the_weights_of_the_model(tmp_path):
    found = {}
    for last in ("full", "weights"):
        (tmp_path / last).mkdir()
        recipe = write(tmp_path / last, 'name = "schedule_free"', steps=4)
        words = ["--set", f'checkpoint.last="{last}"', "--set", "parallel.shard=2"]
        words += ["--set", 'checkpoint.export="hf"']
        done = run_trainer("run", recipe, *words, folder=tmp_path / last, ranks=2)
        assert done.returncode == 0, done.stderr
        run = tmp_path / last / "runs/few"
        found[last] = newest(run)[1]
        exported = load_file(run / "hf/model.safetensors")
        # The export of a resumed end reads the checkpoint instead of the memory.
        shutil.rmtree(run / "hf")
        (run / "exported.json").unlink()
        done = run_trainer("run", recipe, *words, folder=tmp_path / last, ranks=2)
        assert done.returncode == 0, done.stderr
        again = load_file(run / "hf/model.safetensors")
        embedding = found[last]["model.embed.weight"]
        for tensors in (exported, again):
            assert torch.equal(tensors["model.embed_tokens.weight"], embedding), last
    full, weights = found["full"], found["weights"]
    names = [name for name in full if name.startswith("trained.")]
    assert len(names) > 5
    for name in names:
        y, key = full[name], name.removeprefix("trained.")
        x, z = full[f"model.{key}"], full[f"optimizer.{key}.z"]
        assert y.numpy() == pytest.approx((0.1 * z + 0.9 * x).numpy(), abs=1e-6)
        assert not torch.equal(x, y)
        assert torch.equal(weights[f"model.{key}"], x)
    assert not [name for name in weights if name.startswith(("trained.", "optimizer."))]


def test_other_schedules_are_warned_about(caplog):
    with caplog.at_level(logging.WARNING):
        build_alone(recipe_with(optimizer=OPTIMIZER, schedule={"name": "cosine"}))
    assert 'take "constant" with warmup_steps' in caplog.text
    caplog.clear()
    build_alone(recipe_with(optimizer=OPTIMIZER, schedule={"name": "constant"}))
    assert "needs no schedule" not in caplog.text


def build_alone(recipe):
    return assemble(recipe, World(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimizer]\nname = 'schedule_free'\n[ema]\ndecay = 0.9", "averages the weights already"),
        ("[optimizer]\nname = 'schedule_free'\nbetas = [0.0, 0.9]", "must be above 0"),
        (
            "[optimizer]\nname = 'schedule_free'\n[schedule]\nmomentum_warmup_steps = 1",
            "has no momentum",
        ),
    ],
)
def test_what_does_not_fit_is_refused(text, message, tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(f"[run]\nsteps = 1\n{text}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path, [])
    assert message in error.value.render()
