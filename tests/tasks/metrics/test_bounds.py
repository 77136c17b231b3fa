"""Values that torchmetrics refuses at an evaluation are refused when the recipe is read."""

import pytest
import torch
from pydantic import ValidationError

from trainer.engine.tasks.metrics.metric_set import MetricSet
from trainer.engine.tasks.metrics.tables import Outputs, metrics

GENERATOR = torch.Generator().manual_seed(0)
PROBABILITIES = torch.rand(40, generator=GENERATOR)
NUMBERS = torch.rand(40, 2, generator=GENERATOR) + 0.5
BINARY, CLASSES = Outputs("binary"), Outputs("multiclass", 4)


def samples(outputs):
    if outputs.kind == "binary":
        return PROBABILITIES * 4 - 2, (PROBABILITIES.flip(0) > 0.5).long()
    if outputs.kind == "multiclass":
        return torch.randn(40, 4, generator=GENERATOR), torch.arange(40) % 4
    return NUMBERS[:, 0], NUMBERS[:, 1]


CASES = [
    # metric, outputs, key, values that are refused, values at the bound that are taken
    ("auroc", BINARY, "thresholds", [1, 0, -3, [], [0.2, 1.5]], [2, [0.5], [0.0, 1.0]]),
    ("auroc", BINARY, "max_fpr", [0.0, 1.5], [0.01, 1.0]),
    ("accuracy", CLASSES, "top_k", [0, -1], [1, 4]),
    ("accuracy", BINARY, "threshold", [-0.1, 1.1], [0.0, 1.0]),
    ("fbeta_score", BINARY, "beta", [0.0, -1.0], [0.01]),
    ("calibration_error", BINARY, "n_bins", [0], [1]),
    ("recall_at_fixed_precision", BINARY, "min_precision", [-0.1, 1.1], [0.0, 1.0]),
    ("logauc", BINARY, "fpr_range", [[0.5, 0.1], [0.1, 2.0]], [[0.001, 1.0]]),
    ("minkowski_distance", Outputs("regression"), "p", [0.5], [1.0]),
    ("tweedie_deviance_score", Outputs("regression"), "power", [0.5], [0.0, 1.0, 2.0, -1.0]),
    ("r2_score", Outputs("regression"), "adjusted", [-1], [0]),
]


def table(name, key, value):
    return (
        {"name": name, "beta": 1.0, key: value}
        if name == "fbeta_score"
        else {"name": name, key: value}
    )


@pytest.mark.parametrize(
    ("name", "key", "value"), [(n, key, v) for n, _, key, values, _ in CASES for v in values]
)
def test_a_value_beyond_the_bound_is_refused(name, key, value):
    with pytest.raises(ValidationError) as refused:
        metrics[name].model_validate(table(name, key, value))
    assert {error["loc"][0] for error in refused.value.errors()} == {key}


@pytest.mark.parametrize(
    ("name", "outputs", "key", "value"),
    [(n, o, key, v) for n, o, key, _, values in CASES for v in values],
)
def test_a_value_at_the_bound_is_measured(name, outputs, key, value):
    config = metrics[name].model_validate(table(name, key, value))
    collected = MetricSet([config], outputs, torch.device("cpu"))
    collected.update(*samples(outputs))
    assert collected.compute()
