"""`loss` is the task's and `total_loss` what is minimised: against the formula in float64."""

import pytest
import torch

from tests.cases import also
from tests.distributed import run_ranks
from tests.train.moe_family import layers_of, moe_recipe
from tests.train.plans import BASE, assembled, recipe_with
from trainer import train
from trainer.engine.data.batch import IGNORED
from trainer.engine.inference.measure import measure_split, open_splits
from trainer.engine.inference.open import open_model
from trainer.engine.train.evaluate import validate

Z_LOSS = 0.1
LOSS = {"name": "cross_entropy", "z_loss": Z_LOSS}


def found(recipe):
    """Return loss and total loss of the first step, and the validation loss."""
    parts = assembled(recipe)
    gradients = parts.step.accumulate(next(parts.loader.steps(0)))
    return gradients.loss.item(), gradients.total_loss.item(), validate(parts)["loss"]


def expected(recipe):
    """Return the same from all logits at once, in float64."""
    parts = assembled(recipe)
    parts.model.double()
    parts.model.compute_dtype = torch.float64
    task, squares = means(parts.model, next(parts.loader.steps(0)))
    return task, task + Z_LOSS * squares, means(parts.model, parts.validation)[0]


@torch.no_grad()
def means(model, batches):
    """Return the mean cross entropy and squared log-partition of the tokens that count."""
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        sums += model(
            batch.tokens,
            labels=batch.labels,
            loss=sums_of_all,
            positions=batch.positions,
            document_ids=batch.document_ids,
        )
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def sums_of_all(hidden, weight, labels):
    counted = labels != IGNORED
    logits = (hidden @ weight.T)[counted]
    chosen = logits.log_softmax(-1).gather(1, labels[counted].unsqueeze(1))
    return torch.stack([-chosen.sum(), logits.logsumexp(-1).square().sum(), counted.sum()])


PLANS = {"alone": {}, "tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}


@pytest.mark.parametrize("plan", ["alone", "tensor", "pipeline"])
def test_the_loss_has_no_regulariser_and_the_total_loss_has(plan):
    data = BASE["data"] | {"packing": "documents"}
    (wanted,) = run_ranks(1, expected, recipe_with(loss=LOSS, data=data))
    recipe = recipe_with(loss=LOSS, data=data, parallel=PLANS[plan])
    for rank in run_ranks(1 if plan == "alone" else 2, found, recipe):
        assert rank == pytest.approx(wanted, rel=1e-5)
    assert wanted[1] > wanted[0] + 1


def losses_of_routers(recipe):
    """Return what a step reports, and what routers and logits say of it on one process."""
    parts, losses = assembled(recipe), []
    for layer in layers_of(parts):
        layer.router.register_forward_hook(lambda _m, _a, out: losses.append(out.loss.item()))
    batches = next(parts.loader.steps(0))
    parts.step.accumulate(batches)
    routers = sum(losses) / recipe.data.global_batch
    task, squares = means(parts.model, batches)
    return found(recipe)[:2], (task, task + Z_LOSS * squares + routers)


@pytest.mark.parametrize("plan", ["tensor", "pipeline", *also("context", "shard", "expert")])
def test_the_total_loss_has_the_losses_of_routers(plan):
    ((alone, wanted),) = run_ranks(1, losses_of_routers, moe_recipe(loss=LOSS))
    assert alone == pytest.approx(wanted, rel=1e-5)
    parallel = {"expert": {"shard": 2, "expert": 2}}.get(plan) or {plan: 2}
    for rank in run_ranks(2, found, moe_recipe(loss=LOSS, parallel=parallel)):
        assert rank[:2] == pytest.approx(wanted, rel=1e-5)


def test_rows_of_a_run_and_an_evaluation_of_its_checkpoint_agree(tmp_path):
    run = {"steps": 4, "dir": str(tmp_path), "name": "run"}
    sizes = {"evaluate": {"interval": 2, "steps": 1000}, "metrics": {"interval": 1}}
    plain, regularised = (
        train(recipe_with(run=run | {"name": name}, loss=loss, **sizes))
        for name, loss in (("plain", {}), ("run", LOSS))
    )
    rows = [row for row in regularised.rows if row["kind"] == "train"]
    assert all(row["total_loss"] > row["loss"] + 1 for row in rows)
    assert rows[0]["loss"] == plain.rows[0]["loss"] == plain.rows[0]["total_loss"]
    validation = [row["loss"] for row in regularised.rows if row["kind"] == "eval"][-1]
    opened = open_model(regularised.directory)
    measured = measure_split(opened, open_splits(opened)[0], batch_size=4)
    assert validation == pytest.approx(measured.per("token")["loss"], rel=1e-5)
