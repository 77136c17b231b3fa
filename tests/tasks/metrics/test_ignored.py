"""Targets that are ignored, missing or no class: the numbers are torchmetrics' own."""

import math
import os
import warnings

import pytest
import torch
from torchmetrics import functional

from tests.distributed import run_ranks
from trainer.engine.core.errors import DataError
from trainer.engine.tasks.metrics.metric_set import MetricSet
from trainer.engine.tasks.metrics.tables import Outputs, metrics

CPU = torch.device("cpu")
SHARES = [41, 19]
SIZES = {"binary": {}, "multiclass": {"num_classes": 4}, "multilabel": {"num_labels": 3}}
OUTPUTS = {
    "binary": Outputs("binary"),
    "multiclass": Outputs("multiclass", 4),
    "multilabel": Outputs("multilabel", 3),
}
NAMES = {
    "binary": ["accuracy", "f1_score", "auroc", "confusion_matrix", "matthews_corrcoef"],
    "multiclass": ["accuracy", "f1_score", "auroc", "confusion_matrix", "cohen_kappa"],
    "multilabel": ["accuracy", "f1_score", "auroc", "confusion_matrix", "exact_match"],
}
IGNORED = [0, 255, -100]


def samples(kind, ignored):
    generator = torch.Generator().manual_seed(7)
    shape = {"multiclass": (60, 4), "multilabel": (60, 3)}.get(kind, (60,))
    logits = torch.randn(shape, generator=generator)
    noise = logits + torch.randn(shape, generator=generator)
    targets = noise.argmax(-1) if kind == "multiclass" else (noise > 0).long()
    if ignored != 0:
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = ignored
        if kind == "multilabel":  # a sample without any label is none
            targets[:, 0] = targets[:, 0].clamp(0, 1)
    return logits, targets


def build(kind, tables):
    configs = [metrics[table["name"]].model_validate(table) for table in tables]
    return MetricSet(configs, OUTPUTS[kind], CPU)


def measure(shares):
    warnings.simplefilter("ignore")
    rank = int(os.environ.get("RANK", 0))
    rows = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    results = {}
    for kind, names in NAMES.items():
        for ignored in IGNORED:
            whole = [{"name": name, "ignore_index": ignored} for name in names]
            streamed = {**whole[0], "average": "micro"} if kind != "binary" else whole[0]
            collected = build(kind, [*whole, {**streamed, "over": "batch", "key": "streamed"}])
            logits, targets = (each[rows] for each in samples(kind, ignored))
            for batch in zip(logits.split(7), targets.split(7), strict=True):
                collected.update(*batch)
            results[kind, ignored] = collected.compute()
    return results


def expected(kind, ignored):
    logits, targets = samples(kind, ignored)
    scores = logits.softmax(-1) if kind == "multiclass" else logits.sigmoid()
    found = {}
    for name in NAMES[kind]:
        average = {"average": "micro"} if name in ("accuracy", "f1_score") else {}
        call = getattr(functional, name)
        arguments = {"task": kind, **SIZES[kind], "ignore_index": ignored, **average}
        found[name] = call(scores, targets, **arguments).flatten().tolist()
    found["streamed"] = found["accuracy"]  # a mean over samples: batches do not matter
    return found


def test_ignored_targets_are_left_out_as_torchmetrics_does():
    warnings.simplefilter("ignore")
    wanted = {(kind, each): expected(kind, each) for kind in NAMES for each in IGNORED}
    for found in [measure([60]), *run_ranks(2, measure, SHARES)]:
        for case, values in wanted.items():
            for name, numbers in values.items():
                own = [v for key, v in found[case].items() if key.split("/")[0] == name]
                assert own == pytest.approx(numbers, rel=1e-5), (case, name)


def test_a_missing_label_is_left_out_alone_beside_an_ignored_one():
    logits, targets = samples("multilabel", 255)
    targets[::5, 1] = -100
    numbers = targets.float().masked_fill(targets == -100, math.nan)
    collected = build("multilabel", [{"name": "f1_score", "ignore_index": 255}])
    collected.update(logits, numbers)
    both = targets.masked_fill(targets == 255, -100)
    arguments = {"task": "multilabel", "num_labels": 3, "average": "micro", "ignore_index": -100}
    right = functional.f1_score(logits.sigmoid(), both, **arguments)
    assert collected.compute() == {"f1_score": pytest.approx(right.item())}


def test_metrics_that_ignore_different_classes_share_a_table():
    tables = [
        {"name": "accuracy", "ignore_index": 255},
        {"name": "rand_score"},
    ]
    collected = build("multiclass", tables)
    logits, targets = samples("multiclass", 255)
    collected.update(logits, targets)
    found = collected.compute()
    assert found["rand_score"] == functional.clustering.rand_score(logits.argmax(-1), targets)
    kept = targets != 255
    assert found["accuracy"] == (logits.argmax(-1) == targets)[kept].float().mean()


@pytest.mark.parametrize("kind", list(NAMES))
def test_a_target_that_is_no_class_is_refused(kind):
    tables = [{"name": "accuracy", "ignore_index": 255}, {"name": "f1_score"}]
    logits, targets = samples(kind, 255)
    with pytest.raises(DataError, match='metric "f1_score" got the target 255') as error:
        build(kind, tables).update(logits, targets)
    assert "ignore_index = 255" in error.value.hint


def test_all_targets_ignored_is_nan():
    tables = [
        {"name": name, "ignore_index": 2, "key": f"{name}{over}", "over": over}
        for name in ("accuracy", "auroc")
        for over in ("all", "batch")
    ]
    collected = build("multiclass", tables)
    collected.update(torch.randn(3, 4), torch.full((3,), 2))
    assert all(map(math.isnan, collected.compute().values()))
