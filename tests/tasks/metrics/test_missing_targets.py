"""Of several numbers of a sample, a missing one alone is left out, as the loss leaves it out."""

import math

import pytest
import torch
import torch.nn.functional as F

from trainer.engine.tasks.metrics.metric_set import MetricSet
from trainer.engine.tasks.metrics.tables import LIBRARY, Outputs, metrics
from trainer.engine.tasks.tables import losses

GENERATOR = torch.Generator().manual_seed(1)
PREDICTIONS = torch.rand(60, 3, generator=GENERATOR) + 0.5
TARGETS = torch.rand(60, 3, generator=GENERATOR) + 0.5
HOLES = TARGETS.masked_fill(torch.rand(60, 3, generator=GENERATOR) < 0.3, math.nan)
REQUIRED = {"minkowski_distance": {"p": 2.0}, "critical_success_index": {"threshold": 0.9}}
OUTPUTS = Outputs("regression", 3)


def measure(name, predictions, targets, **keys):
    config = metrics[name].model_validate({"name": name, **REQUIRED.get(name, {}), **keys})
    collected = MetricSet([config], OUTPUTS, torch.device("cpu"))
    for rows in (slice(0, 25), slice(25, 60)):
        collected.update(predictions[rows], targets[rows])
    return collected.compute()


def test_the_mean_squared_error_is_that_of_the_loss():
    given = ~HOLES.isnan()
    expected = F.mse_loss(PREDICTIONS[given], HOLES[given]).item()
    found = measure("mean_squared_error", PREDICTIONS, HOLES)["mean_squared_error"]
    assert found == pytest.approx(expected, abs=1e-6)
    batches = measure("mean_squared_error", PREDICTIONS, HOLES, over="batch")
    assert batches["mean_squared_error"] == pytest.approx(expected, abs=1e-6)
    criterion = losses["mse"].model_validate({}).build_criterion()
    fields = {criterion.target: HOLES}
    sums = criterion.sums(PREDICTIONS, fields)["loss"]
    assert sums.item() / given.sum().item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "name", [n for n, row in LIBRARY.items() if row["package"] == "regression"]
)
def test_a_column_without_holes_has_the_number_that_it_has_alone(name):
    """Holes in one column: the others, and the mean, are those of each column's own rows."""
    config = metrics[name].model_validate({"name": name, **REQUIRED.get(name, {})})
    if config.missing != "outputs":
        pytest.skip("no function of columns")
    alone = []
    for column in range(3):
        given = ~HOLES[:, column].isnan()
        p, t = PREDICTIONS[given, column], HOLES[given, column]
        collected = MetricSet([config], Outputs("regression", 1), torch.device("cpu"))
        collected.update(p, t)
        alone += collected.compute().values()
    found = list(measure(name, PREDICTIONS, HOLES).values())
    expected = [sum(alone) / 3] if config.averages_outputs else alone
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "name", [n for n, row in LIBRARY.items() if row["package"] == "regression"]
)
def test_what_is_said_of_a_function_holds_without_holes(name):
    """A function of each number, or of each column, gives the same for numbers that lie apart."""
    config = metrics[name].model_validate({"name": name, **REQUIRED.get(name, {})})
    function = config.build(OUTPUTS)
    whole = function(PREDICTIONS, TARGETS)
    if config.missing == "targets":
        apart = function(PREDICTIONS.flatten(), TARGETS.flatten())
    elif config.missing == "outputs":
        pairs = zip(PREDICTIONS.unbind(1), TARGETS.unbind(1), strict=True)
        apart = torch.stack([function(p, t).reshape(()) for p, t in pairs])
        apart = apart.mean() if config.averages_outputs else apart
    else:
        pytest.skip("a function of samples")
    torch.testing.assert_close(whole.reshape(apart.shape), apart)


def test_a_function_of_samples_leaves_out_the_sample():
    whole = ~HOLES.isnan().any(1)
    found = measure("cosine_similarity", PREDICTIONS, HOLES, reduction="mean")
    expected = F.cosine_similarity(PREDICTIONS[whole], HOLES[whole]).mean().item()
    assert found["cosine_similarity"] == pytest.approx(expected, abs=1e-6)


def test_a_sample_without_any_target_does_not_count():
    targets = TARGETS.clone()
    targets[10:] = math.nan
    found = measure("mean_absolute_error", PREDICTIONS, targets)["mean_absolute_error"]
    assert found == pytest.approx(F.l1_loss(PREDICTIONS[:10], TARGETS[:10]).item(), abs=1e-6)
