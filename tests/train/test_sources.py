"""Losses by source, of steps and of evaluations, on any plan."""

import json
import math
import random

import pytest
import torch

from tests.cases import also
from tests.distributed import run_ranks
from tests.train.plans import BASE, assembled, recipe_with
from trainer import train
from trainer.engine.data.batch import IGNORED
from trainer.engine.inference.measure import measure_split, open_splits
from trainer.engine.inference.open import open_model
from trainer.engine.observe.numbers import to_floats
from trainer.engine.recipe.changes import resume_policy
from trainer.engine.recipe.checks.checks import check
from trainer.engine.train.evaluate import validate

LETTERS = {"lower": "abcdefgh", "upper": "ABCDEFGHIJKL"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two corpora, each of letters of its own."""
    folder, draw = tmp_path_factory.mktemp("corpora"), random.Random(0)
    for name, letters in LETTERS.items():
        texts = ["".join(draw.choices(letters, k=draw.randint(5, 60))) for _ in range(150)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def recipe_of(folder, packing, **changes):
    sources = [
        {"name": "jsonl", "path": str(folder / f"{name}.jsonl"), "weight": weight, **label}
        for name, weight, label in (("lower", 3.0, {"label": "small"}), ("upper", 1.0, {}))
    ]
    data = BASE["data"] | {"sources": sources, "packing": packing, "micro_batch": 2}
    data |= {"validation_fraction": 0.3, "cache_dir": str(folder / "cache")}
    return recipe_with(data=data, evaluate={"steps": 100}, **changes)


def found(recipe):
    """Return the losses of the first step and of an evaluation, as rows have them."""
    parts = assembled(recipe)
    gradients = parts.step.accumulate(next(parts.loader.steps(0)))
    metrics = parts.step.metrics(gradients, lr=0.0)
    row = {name: value for name, value in metrics.items() if name.startswith("loss")}
    validation = validate(parts)
    del validation["perplexity"]
    return to_floats(row), validation


def expected(recipe):
    """Return the same in float64; what letters a row has tells where it is from."""
    parts = assembled(recipe)
    parts.model.double()
    parts.model.compute_dtype = torch.float64
    validation = means(parts.model, parts.validation)
    labels = torch.cat([batch.labels.flatten() for batch in parts.validation])
    counted = labels[labels != IGNORED]
    letters = (counted != parts.tokenizer.eos_id).sum().item()
    bits = validation["loss"] * len(counted) / (math.log(2) * letters)
    return means(parts.model, next(parts.loader.steps(0))), validation | {"bits_per_byte": bits}


@torch.no_grad()
def means(model, batches):
    sums = {"loss": [0.0, 0], "loss/small": [0.0, 0], "loss/1.jsonl": [0.0, 0]}
    capitals = torch.tensor(list(LETTERS["upper"].encode()))
    for batch in batches:
        columns = {"positions": batch.positions, "document_ids": batch.document_ids}
        for row in range(len(batch.tokens)):
            one = {k: v if v is None else v[row : row + 1] for k, v in columns.items()}
            logits = model(batch.tokens[row : row + 1], **one)[0].double()
            labels = batch.labels[row]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            is_upper = torch.isin(batch.tokens[row], capitals).any()
            for key in ("loss", "loss/1.jsonl" if is_upper else "loss/small"):
                sums[key][0] += loss
                sums[key][1] += int((labels != IGNORED).sum())
    return {key: total / count for key, (total, count) in sums.items()}


PLANS = {
    "alone": {},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
    "tensor": {"tensor": 2},
    "shard": {"shard": 2},
}


@pytest.mark.parametrize("packing", ["documents", *also("concat", "none")])
@pytest.mark.parametrize("plan", ["alone", "pipeline", "context", *also("tensor", "shard")])
def test_losses_by_source_are_exact(plan, packing, folder):
    (wanted,) = run_ranks(1, expected, recipe_of(folder, packing))
    recipe = recipe_of(folder, packing, parallel=PLANS[plan])
    for rank in run_ranks(1 if plan == "alone" else 2, found, recipe):
        for got, right in zip(rank, wanted, strict=True):
            assert got == pytest.approx(right, rel=1e-5)


def test_rows_have_each_source_and_a_step_without_one_leaves_it_out(folder, tmp_path):
    run = {"steps": 6, "dir": str(tmp_path), "name": "run"}
    recipe = recipe_of(folder, "none", run=run, metrics={"interval": 1})
    data = recipe.data.model_copy(update={"global_batch": 2})
    rows = train(recipe.model_copy(update={"data": data})).rows
    steps = [row for row in rows if row["kind"] == "train"]
    assert all("loss/small" in row for row in steps)
    assert {"loss/1.jsonl" in row for row in steps} == {True, False}
    for row in steps:
        if "loss/1.jsonl" not in row:
            assert row["loss/small"] == pytest.approx(row["loss"], rel=1e-6)
    (row,) = [row for row in rows if row["kind"] == "eval"]
    low, high = sorted([row["loss/small"], row["loss/1.jsonl"]])
    assert low < row["loss"] < high
    opened = open_model(tmp_path / "run")
    measured = measure_split(opened, open_splits(opened)[0], batch_size=3)
    assert measured.per("token")["loss"] == pytest.approx(row["loss"], rel=1e-5)
    for source, label in zip(measured.sources, ("small", "1.jsonl"), strict=True):
        assert source.name == f"validation split, {label}"
        assert source.per("token")["loss"] == pytest.approx(row[f"loss/{label}"], rel=1e-5)
        assert 0 < source.bytes < source.tokens, "ends of documents have no bytes"
    assert measured.per("byte")["bits"] == pytest.approx(row["bits_per_byte"], rel=1e-5)
    assert measured.texts == sum(each.texts for each in measured.sources)


def test_two_sources_of_a_split_need_labels_of_their_own():
    def problems(*labels):
        sources = [
            {"name": "synthetic", "label": label, "split": split}
            for label, split in zip(labels, ("train", "train", "validation"), strict=True)
        ]
        recipe = recipe_with(run=BASE["run"] | {"name": "run"}, data={"sources": sources})
        return [(path, message) for path, message, _ in check(recipe)]

    assert not problems("books", "code", "books")
    ((path, message),) = problems("books", "books", "code")
    assert path == ("data", "sources", 1, "label")
    assert message == 'source 0 of the "train" split has the label "books" too'
    assert problems("1.synthetic", "", "code")
    assert resume_policy("data.sources.0.label") == "may change"
