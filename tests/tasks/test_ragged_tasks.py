"""Tasks on rows of unequal lengths without padding: all numbers are those of padded rows."""

import json
import random
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from tests.cases import quick
from tests.distributed import run_ranks
from tests.train.float64 import in_float64
from tests.train.plans import BASE, assembled, recipe_with, train
from tests.train.test_ragged import SOURCES
from trainer import infer, open_model
from trainer.engine.inference.evaluate import evaluate
from trainer.engine.launch.environment import World
from trainer.engine.run.run import run
from trainer.engine.train.evaluate import validate
from trainer.model_zoo.llama3.config import Llama3Config

PREFERENCES = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"beta": 0.2, "length_normalized": True},
    "orpo": {"beta": 0.4},
    "simpo": {"gamma": 0.5},
    "kto": {"beta": 0.3, "desirable_weight": 1.5},
}
DATA = {"seq_len": 128, "global_batch": 8, "micro_batch": 3, "validation_fraction": 0.2}
EXPERTS = {"name": "mixtral", "n_layers": 2}
RECORDS = 30
PACKINGS = ("none", "ragged")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs of answers of log-normal lengths; samples of a step need not fill its micro batches."""
    draw = random.Random(0)

    def text(letters):
        length = 1 + min(int(8 * draw.lognormvariate(0, 0.8)), 40)
        return "".join(draw.choices(letters, k=length))

    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"prompt": text("abcxyz "), "chosen": text("abcd"), "rejected": text("wxyz")}
        for _ in range(RECORDS)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def of_pairs(pairs, packing, task="preference", loss="dpo", **changes):
    cache = {"cache_dir": str(pairs.parent / "cache"), "packing": packing}
    data = DATA | {"sources": [{"name": "jsonl", "path": str(pairs)}]} | changes.pop("data", {})
    loss = {"name": loss} | PREFERENCES.get(loss, {})
    return recipe_with(task={"name": task}, loss=loss, data=data | cache, **changes)


def of_hidden_tokens(packing):
    return recipe_with(
        task={"name": "masked_language_modeling"},
        model=BASE["model"] | {"attention": "bidirectional"},
        data=DATA | {"sources": SOURCES, "packing": packing},
    )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    from tests.model_zoo.peers import our_model, their_model

    folder = tmp_path_factory.mktemp("teacher")
    their_model(our_model(vocab_size=320, dim=48, init_std=0.1)).save_pretrained(folder)
    return str(folder)


@pytest.mark.matrix
@pytest.mark.parametrize("top_k", [0, 5])
def test_students_learn_as_from_padded_rows(top_k, teacher):
    task = {"name": "distillation", "teacher": teacher, "top_k": top_k}
    loss = {"name": "forward_kl", "temperature": 2.0, "hard_weight": 0.3}
    recipes = [
        recipe_with(task=task, loss=loss, data=DATA | {"sources": SOURCES, "packing": packing})
        for packing in PACKINGS
    ]
    assert_equal(run_ranks(1, third_steps, recipes)[0], 1e-10)


def third_step(recipe):
    """Return the numbers and gradients of a step after two updates, and of a validation."""
    with in_float64():
        parts = assembled(recipe)
        parts.step.weight_update._clip_norm = 0.0
        train(parts, 2)
        gradients = parts.step.accumulate(next(parts.loader.steps(2)))
        numbers = parts.step.metrics(gradients, 0.0)
        values = {name: float(getattr(x, "total", x)) for name, x in numbers.items()}
        weights = {name: w.grad.numpy().copy() for name, w in parts.model.named_parameters()}
        return values, weights, validate(parts)


def third_steps(recipes):
    return [third_step(recipe) for recipe in recipes]


def assert_equal(found, rel, absolute=1e-12):
    for padded, ragged in zip(*found, strict=True):
        assert ragged.keys() == padded.keys()
        for name, value in padded.items():
            assert ragged[name] == pytest.approx(value, rel=rel, abs=absolute), name


@pytest.mark.parametrize("name", quick([*PREFERENCES, "reward", "masked"], "kto", "masked"))
def test_values_and_gradients_are_those_of_padded_rows(name, pairs):
    if name == "masked":
        recipes = [of_hidden_tokens(packing) for packing in PACKINGS]
    elif name == "reward":
        recipes = [of_pairs(pairs, packing, name, "bradley_terry") for packing in PACKINGS]
    else:  # the reference is frozen, and ragged too; routers count no padding
        experts = {"model": EXPERTS} if name == "kto" else {}
        recipes = [of_pairs(pairs, packing, loss=name, **experts) for packing in PACKINGS]
    found = run_ranks(1, third_steps, recipes)[0]
    # Heads of tasks round to fp32.
    rel, absolute = (1e-5, 1e-8) if name == "reward" else (1e-10, 1e-12)
    assert_equal(found, rel, absolute)


def curves_and_validations(recipes):
    found = []
    for recipe in recipes:
        parts = assembled(recipe)
        found.append([*np.ravel(train(parts)), *validate(parts).values()])
    return found


def test_two_ranks_with_unequal_lengths_train_as_one(pairs):
    recipes = [
        of_pairs(pairs, "ragged", loss="kto"),
        of_pairs(pairs, "ragged", "reward", "bradley_terry"),
    ]
    (alone,) = run_ranks(1, curves_and_validations, recipes)
    for rank in run_ranks(2, curves_and_validations, recipes):
        for got, wanted in zip(rank, alone, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def run_and_stop(folder, pairs):
    """Run three steps at once, and one and two; return what both have recorded."""
    source = {"name": "jsonl", "path": str(pairs)}
    # Three steps see each pair once.
    data = {"global_batch": 10, "sources": [source, source | {"split": "validation"}]}
    for name, stops in (("whole", [3]), ("parts", [1, 3])):
        for steps in stops:
            recipe = of_pairs(
                pairs,
                "ragged",
                data=data,
                run={"steps": steps, "seed": 3, "dir": folder, "name": name},
                metrics={"interval": 1},
                evaluate={"interval": 1},
                checkpoint={"mode": "sync"},
            )
            with patch("trainer.engine.run.watch.device_peak_flops", lambda *_: 1e12):
                assert run(recipe, World(0, 1, 0, 1)) == 0
    opened = open_model(Path(folder) / "whole")
    return (
        evaluate(opened),
        list(infer(opened, pairs)),
        *(rows_of(folder, n) for n in ("whole", "parts")),
    )


def rows_of(folder, name):
    return [json.loads(line) for line in (Path(folder) / name / "metrics.jsonl").open()]


def test_a_run_resumes_bit_for_bit_counts_real_tokens_and_is_evaluated(pairs, tmp_path):
    numbers, predictions, whole, parts = run_ranks(1, run_and_stop, str(tmp_path), pairs)[0]
    keys = ("kind", "step", "loss", "grad_norm", "accuracy")
    assert [[row.get(key) for key in keys] for row in whole] == [
        [row.get(key) for key in keys] for row in parts
    ]
    assert numbers["loss"] == pytest.approx(whole[-1]["loss"], rel=1e-5)
    assert len(predictions) == RECORDS
    counted = sum(1e12 * row["mfu"] * row["step_seconds"] for row in whole if "mfu" in row)
    config = Llama3Config(**BASE["model"]).with_vocab(257)
    records = map(json.loads, pairs.read_text().splitlines())
    # A byte is a token, and an answer ends with one more.
    lengths = [len(x["prompt"] + x[side]) + 1 for x in records for side in ("chosen", "rejected")]
    flops = sum(length * config.flops_per_token(length) for length in lengths)
    assert counted == pytest.approx(4 / 3 * flops), "a third for the reference"


def run_padded(folder, pairs):
    """Train a step of KTO on all pairs, padded to the longest."""
    source = {"name": "jsonl", "path": str(pairs)}
    recipe = of_pairs(
        pairs,
        "none",
        loss="kto",
        data={
            "global_batch": RECORDS,
            "pad_to": 4,
            "sources": [source, source | {"split": "validation"}],
        },
        run={"steps": 1, "dir": folder, "name": "padded"},
        metrics={"interval": 1},
        evaluate={"interval": 0},
    )
    with patch("trainer.engine.run.watch.device_peak_flops", lambda *_: 1e12):
        assert run(recipe, World(0, 1, 0, 1)) == 0
    return [row for row in rows_of(folder, "padded") if "mfu" in row]


def test_mfu_counts_padded_rows_as_they_are_and_the_passes_over_mismatches(pairs, tmp_path):
    (row,) = run_ranks(1, run_padded, str(tmp_path), pairs)[0]
    counted = 1e12 * row["mfu"] * row["step_seconds"]
    config = Llama3Config(**BASE["model"]).with_vocab(257)
    records = list(map(json.loads, pairs.read_text().splitlines()))
    answers = [(x["prompt"], x[side]) for x in records for side in ("chosen", "rejected")]
    longest = max(len(prompt + answer) + 1 for prompt, answer in answers)
    most = max(len(prompt) for prompt, _ in answers) + max(len(answer) for _, answer in answers) + 1
    # The longest row is one with its own prompt or with another's. The reference adds a third of a
    # step, and each of the two models another third for the mismatched answers.
    possible = [
        2 * 2 * RECORDS * length * config.flops_per_token(length)
        for length in range(-(-longest // 4) * 4, -(-most // 4) * 4 + 1, 4)
    ]
    assert most < DATA["seq_len"] - 8
    assert any(counted == pytest.approx(flops, rel=1e-9) for flops in possible)
