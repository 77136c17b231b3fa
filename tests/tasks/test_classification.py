"""Classification and question answering have the losses of transformers on the same texts."""

import json

import numpy as np
import pytest
import torch
import transformers

from tests.conversion.models import VARIANTS
from tests.conversion.test_heads import export, random_model
from tests.recipes.test_task_checks import problems
from trainer.engine.data.collate import Collation
from trainer.engine.data.tables import Data
from trainer.engine.tasks.classification.batch import make_collation
from trainer.engine.tasks.tables import TaskSettings, losses, tasks
from trainer.kernels.choose import choose

EOS = 256
LENGTHS = (5, 12, 9)


def encoded(labels):
    """Return texts of unequal lengths with their labels."""
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 256, length) for length in LENGTHS]
    return [
        {"tokens": np.append(text[:-1], EOS).astype(np.int32), "labels": np.asarray(label)}
        for text, label in zip(texts, labels, strict=True)
    ]


def loss_and_gradients(table, samples, folder, loss=None, **changes):
    """Return our loss of samples, with the weights' gradients, and transformers' model of them."""
    model, config = random_model(table.head(), **(VARIANTS["untied"] | changes))
    model.eval()
    chosen = losses[loss or table.default_loss(table.model_dump())]()
    settings = TaskSettings(chosen, choose({}, "cpu", 12), Data(), config)
    task = table.build(settings)
    collation: Collation = make_collation(table.name, EOS)
    arrays = collation.collate(samples, 12)
    columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
    batch = collation.batch_class.from_columns(columns).without_padding()
    record, counts = task.record(batch), task.counts(batch)
    sums = task.forward(model, batch, record)
    (sums * task.factors(counts, 1.0)).sum().backward()
    folder = export(folder, model, config)
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    theirs = getattr(transformers, name).from_pretrained(folder).eval()
    theirs.config.pad_token_id = EOS + 1  # not a token of the texts
    return task.mean_loss(record.sums(sums), counts).item(), model, theirs, columns


def their_inputs(columns):
    """Return the same texts as transformers takes them: padding has a token of its own."""
    tokens = columns["tokens"].masked_fill(columns["padding_mask"], EOS + 1)
    return {"input_ids": tokens, "attention_mask": (~columns["padding_mask"]).long()}


def compare_gradients(model, theirs, ours="layers.0.mlp.down.weight"):
    wanted = theirs.get_submodule(theirs.base_model_prefix).layers[0].mlp.down_proj.weight.grad
    torch.testing.assert_close(model.get_parameter(ours).grad, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ({"labels": ["a", "b", "c"]}, [2, 0, 1]),
        ({"labels": ["a", "b", "c"], "problem": "multi"}, np.eye(3, dtype=np.float32)[[0, 2, 2]]),
        ({"problem": "regression", "targets": 2}, np.arange(6, dtype=np.float32).reshape(3, 2)),
    ],
    ids=["single", "multi", "regression"],
)
def test_texts_have_the_loss_of_transformers(values, labels, tmp_path):
    table = tasks["sequence_classification"](**values)
    loss, model, theirs, columns = loss_and_gradients(table, encoded(labels), tmp_path / "hf")
    out = theirs(**their_inputs(columns), labels=columns["labels"])
    out.loss.backward()
    assert loss == pytest.approx(out.loss.item(), rel=1e-5)
    compare_gradients(model, theirs)


def test_words_have_the_loss_of_transformers(tmp_path):
    table = tasks["token_classification"](labels=["a", "b", "c", "d"])
    labels = [np.array([-100, *([1, 3] * 6)][:length], np.int32) for length in LENGTHS]
    loss, model, theirs, columns = loss_and_gradients(table, encoded(labels), tmp_path / "hf")
    out = theirs(**their_inputs(columns), labels=columns["labels"])
    out.loss.backward()
    assert loss == pytest.approx(out.loss.item(), rel=1e-5)
    compare_gradients(model, theirs)


def test_answers_have_the_loss_of_transformers_without_padding(tmp_path):
    """transformers also scores padding: each text goes there alone."""
    table = tasks["question_answering"]()
    spans = [np.array(span) for span in ([1, 3], [7, 7], [2, 8])]
    loss, _, theirs, columns = loss_and_gradients(table, encoded(spans), tmp_path / "hf")
    total = 0
    for row, length in enumerate(LENGTHS):
        first, last = columns["labels"][row : row + 1].unbind(1)
        tokens = columns["tokens"][row : row + 1, :length]
        total = total + theirs(tokens, start_positions=first, end_positions=last).loss / 3
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ('labels = ["a"]', "task.labels", "at least 2 classes"),
        ('labels = ["a", "b", "a"]', "task.labels", "names 'a' twice"),
        ('labels = ["a", "b"]\nproblem = "regression"', "task", "a regression has no labels"),
    ],
)
def test_labels_that_cannot_be_are_refused(text, key, part, tmp_path):
    source = '[[data.sources]]\nname = "jsonl"\npath = "x.jsonl"\n'
    found = problems(tmp_path, f'{source}[task]\nname = "sequence_classification"\n{text}')
    assert any(part in message for _, message in found), found


def test_a_model_s_dropout_and_classes_are_those_of_the_task():
    table = tasks["token_classification"](labels=["a", "b"], dropout=0.25)
    assert table.head().dropout == 0.25
    assert table.head().labels == ("a", "b")
