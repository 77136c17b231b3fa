"""Metrics of a validation count each sample once on any number of ranks; the best follows them."""

import math
import os
from pathlib import Path

import pytest
import torch

import trainer
from tests.distributed import run_ranks
from tests.train.plans import assembled, recipe_with, train
from tests.train.processes import complaints, finish, rows, start
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.recipe.load import load_recipe
from trainer.engine.train.evaluate import validate

RECIPE = Path(trainer.__file__).parent.resolve() / "recipes" / "supervised_debug.toml"
TEXTS = RECIPE.with_name("sequence_classification_debug.toml")
METRICS = """
[[evaluate.metrics]]
name = "accuracy"
[[evaluate.metrics]]
name = "recall"
average = "none"
[[evaluate.metrics]]
name = "accuracy"
over = "batch"
key = "streamed"
[[evaluate.metrics]]
name = "auroc"
"""


def write(folder, text=""):
    path = folder / "r.toml"
    # 148 training images, and 37 for validation: no number of ranks or rows divides them.
    path.write_text(
        f"""extends = ["{RECIPE}"]
[run]
steps = 6
dir = "{folder}"
name = "run"
[[data.sources]]
name = "shapes"
count = 148
[[data.sources]]
name = "shapes"
count = 148
split = "validation"
[schedule]
warmup_steps = 0
[precision]
compute = "fp32"
{text or "[evaluate]"}
interval = 1
steps = 100
{METRICS}"""
    )
    return path


def numbers(path, together):
    parts = assembled(load_recipe(path, [], world=int(os.environ["WORLD_SIZE"])).recipe)
    found = validate(parts)
    if not together:
        return found, None
    dataset = parts.recipe.data.sources[1].build("validation")
    images = torch.stack([torch.from_numpy(each["image"]) for each in dataset_items(dataset)])
    labels = torch.tensor([each["labels"] for each in dataset_items(dataset)])
    with torch.no_grad():
        return found, (parts.model(images), labels)


def dataset_items(dataset):
    return [dataset[index] for index in range(len(dataset))]


def test_each_sample_counts_once_on_any_number_of_ranks(tmp_path):
    path = write(tmp_path)
    ((alone, (scores, labels)),) = run_ranks(1, numbers, path, True)
    assert len(labels) == 37
    right = (scores.argmax(1) == labels).double()
    for key in ("accuracy", "streamed"):
        assert alone[key] == pytest.approx(right.mean().item())
    for each in range(4):
        share = right[labels == each].mean().item()
        assert alone[f"recall/{each}"] == pytest.approx(share)
    for found, _ in run_ranks(2, numbers, path, False):
        assert found == pytest.approx(alone, rel=1e-5)


def test_the_best_checkpoint_has_the_highest_accuracy_and_the_latest_of_equals(tmp_path):
    path = write(tmp_path, "[checkpoint]\nkeep_best = true\n[evaluate]\nmetric = 'accuracy'")
    assert finish(start(path)) == [0], complaints(path)
    scores = {row["step"]: row["accuracy"] for row in rows(tmp_path, "eval")}
    step = max(scores, key=lambda step: (scores[step], step))
    assert os.readlink(tmp_path / "run" / "checkpoints" / "best") == f"step-{step:08d}"
    best = find_checkpoint(tmp_path / "run").manifest.extra["best"]
    assert (best["metric"], best["direction"], best["step"]) == ("accuracy", "max", step)
    assert math.isclose(best["score"], scores[step])


def token_accuracy(recipes, is_checked):
    """Return the accuracy of tokens; checked by logits of whole batches on one process."""
    found = []
    for recipe in recipes:
        parts = assembled(recipe)
        train(parts)
        found.append(validate(parts)["accuracy"])
    if is_checked:
        right = total = 0
        for batch in parts.validation:
            with torch.no_grad():
                best = parts.model(batch.tokens).argmax(-1)
            right += ((best == batch.labels) & (batch.labels >= 0)).sum().item()
            total += (batch.labels >= 0).sum().item()
        assert found[-1] == pytest.approx(right / total)
        assert right
    return found


def numbers_of_texts(plans):
    """Return the metrics of a trained classifier under several plans."""
    found = []
    for plan in plans:
        settings = ["model.n_layers=2", "evaluate.steps=9", 'precision.compute="fp32"', *plan]
        settings.append("evaluate.metrics=[{name='accuracy'},{name='stat_scores'},{name='auroc'}]")
        recipe = load_recipe(TEXTS, settings, world=int(os.environ["WORLD_SIZE"])).recipe
        parts = assembled(recipe)
        train(parts, 3)
        found.append(validate(parts))
    return found


def of_tokens_and_texts(recipes, plans, is_checked):
    return token_accuracy(recipes, is_checked), numbers_of_texts(plans)


@pytest.mark.matrix
def test_tokens_and_texts_count_once_under_any_plan():
    evaluate = {"evaluate": {"steps": 3, "metrics": [{"name": "accuracy"}]}}
    plain = [recipe_with(**evaluate)]
    (alone,) = run_ranks(1, of_tokens_and_texts, plain, [[]], True, timeout=200)
    ((accuracy,), (texts,)) = alone
    assert sum(texts[f"stat_scores/{each}"] for each in range(4)) == 36 * 3
    tokens = [{"tensor": 2, "context": 2}, {"pipeline": 2, "shard": 2}]
    split = [recipe_with(**evaluate, parallel=plan) for plan in tokens]
    plans = [
        ["parallel.tensor=2", "parallel.context=2"],
        ["parallel.pipeline=2", "parallel.shard=2", "parallel.pipelining.micro_batches=2"],
    ]
    for found in run_ranks(4, of_tokens_and_texts, split, plans, False, timeout=200):
        assert found[0] == pytest.approx([accuracy] * len(split), rel=1e-6)
        for numbers in found[1]:
            assert numbers == pytest.approx(texts, rel=1e-3)
