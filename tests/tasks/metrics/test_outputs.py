"""Curves, perplexity and several numbers a sample; outputs that are NaN; ranks without samples."""

import math
import os
from typing import Literal

import pytest
import torch
from torchmetrics import functional

from tests.distributed import run_ranks
from trainer.engine.core.errors import DataError
from trainer.engine.tasks.metrics.metric_set import MetricSet
from trainer.engine.tasks.metrics.tables import MetricConfig, Outputs, metrics

CPU = torch.device("cpu")
OPEN = Outputs("multiclass")
OTHERS = {"name": "perplexity", "key": "others", "ignore_index": 1}


def build(outputs, *tables):
    given = [{"name": each} if isinstance(each, str) else each for each in tables]
    return MetricSet([metrics[each["name"]].model_validate(each) for each in given], outputs, CPU)


def measure(collected, *batch):
    collected.update(*batch)
    return collected.compute()


def logits_and_classes():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(30, 3, generator=generator)
    return logits, (logits + torch.randn(30, 3, generator=generator)).argmax(-1)


def test_curves_are_numbers_at_the_thresholds_of_the_recipe():
    logits, classes = logits_and_classes()
    tables = [
        {"name": each, "thresholds": [0.25, 0.5]} for each in ("roc", "precision_recall_curve")
    ]
    collected = build(Outputs("multiclass", 3, labels=("a", "b", "c")), *tables)
    collected.update(logits, classes)
    found = collected.compute()
    for index, label in enumerate("abc"):
        for threshold in (0.25, 0.5):
            chosen = logits.softmax(-1)[:, index] >= threshold
            is_class = classes == index
            right = (chosen & is_class).sum() / is_class.sum()
            share = (chosen & is_class).sum() / chosen.sum()
            false = (chosen & ~is_class).sum() / (~is_class).sum()
            assert found[f"roc/tpr/{threshold}/{label}"] == pytest.approx(right.item())
            assert found[f"roc/fpr/{threshold}/{label}"] == pytest.approx(false.item())
            name = f"precision_recall_curve/precision/{threshold}/{label}"
            assert found[name] == pytest.approx(share.item())
    assert len(found) == 2 * 2 * 2 * 3


def test_perplexity_is_the_exponential_of_the_mean_loss():
    logits, classes = logits_and_classes()
    collected = build(Outputs("multiclass", 3), "perplexity", OTHERS)
    collected.update(logits, classes)
    right = [torch.nn.functional.cross_entropy(logits, classes, ignore_index=i) for i in (-100, 1)]
    assert list(collected.compute().values()) == pytest.approx(
        [each.exp().item() for each in right]
    )


def test_several_numbers_a_sample_have_a_result_each():
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(20, 2, generator=generator)
    y = x + torch.rand(20, 2, generator=generator)
    names = [
        "pearson_corrcoef",
        "mean_absolute_error",
        {"name": "r2_score", "multioutput": "raw_values"},
    ]
    collected = build(Outputs("regression", 2), *names)
    collected.update(x, y)
    found = collected.compute()
    for column in range(2):
        pair = x[:, column], y[:, column]
        assert found[f"pearson_corrcoef/{column}"] == pytest.approx(
            torch.corrcoef(torch.stack(pair))[0, 1].item()
        )
        assert found[f"r2_score/{column}"] == pytest.approx(
            functional.r2_score(*pair).item(), rel=1e-5
        )
    assert found["mean_absolute_error"] == pytest.approx((x - y).abs().mean().item())
    pearson = metrics["pearson_corrcoef"]()
    assert [pearson.is_scalar(Outputs("regression", each)) for each in (1, 2)] == [True, False]
    streamed = build(Outputs("regression"), {"name": "pearson_corrcoef", "over": "batch"})
    with pytest.raises(DataError, match="several numbers for these outputs"):
        streamed.update(x, y)


@pytest.mark.parametrize("name", ["kendall_rank_corrcoef", "spearman_corrcoef", "r2_score"])
def test_a_column_of_numbers_is_one_number_a_sample(name):
    x, y = torch.tensor([[1.0], [2], [3], [5]]), torch.tensor([[1.0], [3], [2], [5]])
    collected = build(Outputs("regression", 1), name)
    collected.update(x, y)
    right = getattr(functional, name)(x[:, 0], y[:, 0])
    assert collected.compute() == {name: pytest.approx(right.item())}


class Share(MetricConfig):
    name: Literal["share"] = "share"

    def uses_labels(self, outputs):
        return True

    def build(self, outputs):
        return lambda predictions, targets: (predictions == targets).float().mean()


def test_a_plugin_s_metric_of_labels_gets_whole_samples():
    collected = MetricSet([Share()], Outputs("multilabel", 2), CPU)
    collected.update(torch.tensor([[1.0, -1], [1, 1]]), torch.tensor([[1, 1], [-100, 1]]))
    assert collected.compute() == {"share": 0.5}


@pytest.mark.parametrize("over", ["all", "batch"])
def test_an_output_that_is_nan_makes_every_metric_nan(over):
    tables = [{"name": name, "over": over} for name in ("accuracy", "auroc")]
    collected = build(Outputs("multiclass", 3), *tables)
    logits, classes = logits_and_classes()
    collected.update(logits, classes)
    logits[4, 1] = math.nan
    collected.update(logits, classes)
    assert all(map(math.isnan, collected.compute().values()))
    collected.update(logits[:4], classes[:4])
    assert not any(map(math.isnan, collected.compute().values()))


def measure_some():
    collected = build(OPEN, "accuracy", "auroc", {"name": "accuracy", "over": "batch", "key": "b"})
    if int(os.environ["RANK"]):
        collected.update(*logits_and_classes())
    return collected.compute()


def test_a_rank_without_samples_learns_the_classes_of_the_others():
    logits, classes = logits_and_classes()
    accuracy = (logits.argmax(-1) == classes).float().mean().item()
    first, second = run_ranks(2, measure_some)
    assert first == second
    assert first["accuracy"] == first["b"] == pytest.approx(accuracy)
    assert first["auroc"] > 0.5


@pytest.mark.parametrize(
    ("tables", "logits", "classes", "message"),
    [
        (
            [{"name": "accuracy", "top_k": 4}],
            (5, 3),
            (5,),
            'top_k" of the metric "accuracy": there are 3',
        ),
        (["accuracy"], (5, 3), (4,), r"outputs \[5, 3\], targets \[4\]"),
    ],
)
def test_what_does_not_fit_is_named(tables, logits, classes, message):
    with pytest.raises(DataError, match=message):
        measure(build(OPEN, *tables), torch.zeros(logits), torch.zeros(classes).long())


def test_what_torchmetrics_refuses_of_the_samples_is_told_with_their_shapes():
    collected = build(Outputs("regression", 1), {"name": "r2_score"})
    collected.update(torch.zeros(1), torch.zeros(1))
    with pytest.raises(DataError, match=r'metric "r2_score" fails for predictions \[1\]'):
        collected.compute()
