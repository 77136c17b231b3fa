"""Metrics over ranks with unequal numbers of samples are those of all samples at once."""

import math
import os
import warnings
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch

from tests.distributed import run_ranks
from trainer.engine.core.errors import DataError, EnvironmentFault
from trainer.engine.core.registry import require_package
from trainer.engine.tasks.metrics.gather import gather_rows
from trainer.engine.tasks.metrics.meters import MeanMeters
from trainer.engine.tasks.metrics.metric_set import MetricSet
from trainer.engine.tasks.metrics.tables import MetricConfig, Outputs, metrics

CPU = torch.device("cpu")
SAMPLES = 60
# So many samples go to each rank, in batches of 7 and what is left.
SHARES = [41, 19]
CLASSES = Outputs("multiclass", 4, labels=("a", "b", "c", "d"))
KINDS = {
    "multiclass": CLASSES,
    "binary": Outputs("binary"),
    "multilabel": Outputs("multilabel", 3),
    "regression": Outputs("regression"),
}


def configs(*tables):
    return [
        metrics[table["name"]].model_validate(table)
        for table in ({"name": each} if isinstance(each, str) else each for each in tables)
    ]


def samples(kind):
    generator = torch.Generator().manual_seed(5)
    shape = {"multiclass": (SAMPLES, 4), "multilabel": (SAMPLES, 3)}.get(kind, (SAMPLES,))
    predictions = torch.randn(shape, generator=generator)
    noise = predictions + torch.randn(shape, generator=generator)
    targets = {
        "multiclass": noise.argmax(-1),
        "regression": noise,
    }.get(kind, (noise > 0).long())
    return predictions, targets


def measure(kinds, shares):
    warnings.simplefilter("ignore")
    rank = int(os.environ.get("RANK", 0))
    rows = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    results = {}
    for kind, tables in kinds.items():
        collected = MetricSet(configs(*tables), KINDS[kind], CPU)
        predictions, targets = (each[rows] for each in samples(kind))
        found = []
        for _ in range(2):  # the second time shows that nothing is left of the first
            for batch in zip(predictions.split(7), targets.split(7), strict=True):
                collected.update(*batch)
            found.append(collected.compute())
        assert str(found[0]) == str(found[1])
        results[kind] = found[0]
    return results


def areas(scores, targets):
    """Return the area under the ROC curve: the share of pairs in the right order (Mann-Whitney)."""
    positive, negative = scores[targets], scores[~targets]
    above = (positive[:, None] > negative).mean()
    return above + 0.5 * (positive[:, None] == negative).mean()


def expected_of_classes():
    """Return the metrics of the classes by their definitions."""
    logits, targets = (each.numpy() for each in samples("multiclass"))
    chosen = logits.argmax(-1)
    counts = np.zeros((4, 4))
    np.add.at(counts, (targets, chosen), 1)
    hits, real, guessed = counts.diagonal(), counts.sum(1), counts.sum(0)
    scores = np.exp(logits.astype(np.float64))
    scores /= scores.sum(1, keepdims=True)
    by_class = 2 * hits / (real + guessed)
    chance = (real * guessed).sum() / SAMPLES**2
    best_two = np.argsort(-logits, 1)[:, :2]
    return {
        "accuracy": hits.sum() / SAMPLES,
        "second": (best_two == targets[:, None]).any(1).mean(),
        "f1_score": by_class.mean(),
        **{f"each/{label}": value for label, value in zip("abcd", by_class, strict=True)},
        "cohen_kappa": (hits.sum() / SAMPLES - chance) / (1 - chance),
        "auroc": np.mean([areas(scores[:, each], targets == each) for each in range(4)]),
        **{
            f"confusion_matrix/{row}/{column}": counts[index, other]
            for index, row in enumerate("abcd")
            for other, column in enumerate("abcd")
        },
    }


CLASS_METRICS = [
    "accuracy",
    {"name": "accuracy", "top_k": 2, "key": "second"},
    {"name": "f1_score", "average": "macro"},
    {"name": "f1_score", "average": "none", "key": "each"},
    "cohen_kappa",
    "auroc",
    "confusion_matrix",
]


def expected_of_the_others():
    x, y = (each.double().numpy() for each in samples("regression"))
    scores, targets = (each.numpy() for each in samples("binary"))
    logits, labels = (each.numpy() for each in samples("multilabel"))
    return {
        "regression": {
            "mean_squared_error": ((x - y) ** 2).mean(),
            "pearson_corrcoef": np.corrcoef(x, y)[0, 1],
            "r2_score": 1 - ((x - y) ** 2).sum() / ((y - y.mean()) ** 2).sum(),
            "spearman_corrcoef": np.corrcoef(x.argsort().argsort(), y.argsort().argsort())[0, 1],
        },
        "binary": {
            "auroc": areas(scores, targets == 1),
            "precision": ((scores > 0) & (targets == 1)).sum() / (scores > 0).sum(),
        },
        "multilabel": {
            "hamming_distance": ((logits > 0) != labels).mean(),
            "exact_match": ((logits > 0) == labels).all(1).mean(),
        },
    }


def test_metrics_over_ranks_are_those_of_all_samples():
    expected = {"multiclass": expected_of_classes(), **expected_of_the_others()}
    kinds = {kind: list(values) for kind, values in expected.items()}
    kinds["multiclass"] = CLASS_METRICS
    for found in [measure(kinds, [SAMPLES]), *run_ranks(2, measure, kinds, SHARES)]:
        for kind, values in expected.items():
            assert found[kind] == pytest.approx(values, rel=1e-5), kind


def test_many_classes_are_gathered_and_missing_targets_do_not_count():
    outputs = Outputs("multiclass", 5000)
    collected = MetricSet(configs("accuracy", "auroc")[:1], outputs, CPU)
    logits = torch.zeros(4, 5000)
    logits[:, 4321] = 1
    collected.update(logits, torch.tensor([4321, -100, 7, 4321]))
    assert collected.compute() == {"accuracy": pytest.approx(2 / 3)}


def test_means_over_batches_are_weighted_by_samples():
    table = {"name": "mean_squared_error", "squared": False, "over": "batch"}
    collected = MetricSet(configs(table), KINDS["regression"], CPU)
    collected.update(torch.zeros(3), torch.full((3,), 2.0))
    collected.update(torch.zeros(1), torch.full((1,), 6.0))
    collected.update(torch.zeros(2), torch.full((2,), 5.0))
    assert collected.compute() == {"mean_squared_error": pytest.approx((3 * 2 + 6 + 2 * 5) / 6)}


def test_without_samples_metrics_are_nan():
    collected = MetricSet(configs("accuracy", "auroc"), CLASSES, CPU)
    collected.update(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    assert all(map(math.isnan, collected.compute().values()))


class NearMiss(MetricConfig):
    name: Literal["near_miss"] = "near_miss"
    kinds: ClassVar = ("multiclass",)

    def build(self, outputs):
        def near(predictions, targets):
            error = (predictions.argmax(-1) - targets).abs()
            return {"": (error <= 1).float().mean(), "far": error.max()}

        return near


def test_a_plugin_s_metric_gets_probabilities_of_all_samples():
    collected = MetricSet([NearMiss()], CLASSES, CPU)
    logits = torch.eye(4)
    collected.update(logits[[0, 1]], torch.tensor([1, 1]))
    collected.update(logits[[0, 3]], torch.tensor([3, 3]))
    assert collected.compute() == {"near_miss": 0.75, "near_miss/far": 3.0}


def test_what_torchmetrics_refuses_is_told_with_the_metric():
    collected = MetricSet(configs("kl_divergence"), KINDS["regression"], CPU)
    collected.update(torch.rand(3), torch.rand(3))
    with pytest.raises(DataError, match=r'metric "kl_divergence" fails for predictions \[3\]'):
        collected.compute()


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(EnvironmentFault, match='the metric "x" needs the torchmetrix package'):
        require_package("torchmetrix.functional", 'the metric "x"', "metrics")


def add_numbers():
    meters = MeanMeters(["loss", "none"], CPU, num_extra=2)
    rank = int(os.environ["RANK"])
    meters.add("loss", [1.0, math.nan, 4.0] if rank else 10.0, [1.0, 9.0, 3.0] if rank else 4)
    meters.extra += torch.tensor([rank, 1])
    return meters.reduce(), meters.extra.tolist()


def test_meters_leave_out_nan_and_weigh_the_rest():
    for means, extra in run_ranks(2, add_numbers):
        assert means["loss"] == (1 + 3 * 4 + 4 * 10) / 8
        assert math.isnan(means["none"])
        assert extra == [1, 2]


def gather_some():
    rank = int(os.environ["RANK"])
    rows = [None, torch.arange(6).view(3, 2), torch.tensor([[7, 8]])][rank]
    nothing = gather_rows(None, CPU)
    return gather_rows(rows, CPU).tolist(), nothing.tolist()


def test_rows_of_ranks_are_gathered_in_order():
    for found in run_ranks(3, gather_some):
        assert found == ([[0, 1], [2, 3], [4, 5], [7, 8]], [])
