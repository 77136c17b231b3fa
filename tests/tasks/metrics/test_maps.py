"""Means over maps of classes are those of torchmetrics over the whole set."""

import math
import os
import sys
import warnings

import numpy as np
import pytest
import torch
from torchmetrics.functional import segmentation

from tests.distributed import run_ranks
from trainer.engine.assemble.assemble import assemble
from trainer.engine.core.errors import DataError
from trainer.engine.launch.environment import World
from trainer.engine.recipe.load import load_recipe
from trainer.engine.tasks.metrics.metric_set import MetricSet
from trainer.engine.tasks.metrics.tables import Outputs, metrics
from trainer.engine.train.evaluate import validate

CPU = torch.device("cpu")
CLASSES = 4
MAPS = Outputs("multiclass", may_be_maps=True)
MASKS = Outputs("binary", may_be_maps=True)
SHARES = [8, 3]
TABLES = {
    "mean_iou": {},
    "foreground": {"name": "mean_iou", "include_background": False},
    "classes": {"name": "mean_iou", "per_class": True},
    "dice_score": {},
    "micro": {"name": "dice_score", "average": "micro", "over": "batch"},
    "weighted": {"name": "dice_score", "average": "weighted"},
    "each": {"name": "dice_score", "average": "none", "include_background": False},
    "generalized_dice_score": {},
    "linear": {"name": "generalized_dice_score", "weight_type": "linear", "per_class": True},
    "simple": {"name": "generalized_dice_score", "weight_type": "simple"},
}


def build(outputs, tables):
    given = [{"name": key, "key": key} | table for key, table in tables.items()]
    return MetricSet([metrics[each["name"]].model_validate(each) for each in given], outputs, CPU)


def maps():
    """Return logits [N, H, W, C] and classes [N, H, W]; some maps lack some classes."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(sum(SHARES), 6, 5, CLASSES, generator=draw)
    noise = logits + torch.randn(logits.shape, generator=draw)
    logits[::3, ..., 2:] -= 9
    noise[::3, ..., 2:] -= 9
    return logits, noise.argmax(-1)


def measure(shares, tables):
    rank = int(os.environ.get("RANK", 0))
    rows = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    collected = build(MAPS, {**tables, "f1_score": {}})
    for batch in zip(*(each[rows].split(3) for each in maps()), strict=True):
        collected.update(*batch)
    return collected.compute()


def expected():
    """Return the means of torchmetrics' numbers of all maps by their keys."""
    warnings.simplefilter("ignore")
    logits, targets = maps()
    found = {}
    for key, table in TABLES.items():
        arguments = {name: x for name, x in table.items() if name not in ("name", "over")}
        function = getattr(segmentation, table.get("name", key))
        pairs = [(logits.argmax(-1), targets)]
        if function is segmentation.generalized_dice_score:  # it looks at other maps of a batch
            pairs = list(zip(logits.argmax(-1)[:, None], targets[:, None], strict=True))
        values = torch.cat([
            function(*pair, num_classes=CLASSES, input_format="index", **arguments)
            for pair in pairs
        ])  # fmt: skip
        if arguments.get("per_class"):
            values[values == -1] = math.nan
        mean = values.double().nanmean(0)
        names = range(not table.get("include_background", True), CLASSES)
        each = {f"{key}/{name}": x for name, x in zip(names, mean.tolist(), strict=True)} if (
            mean.dim()
        ) else {key: mean.item()}  # fmt: skip
        found |= each
    return found


def test_means_over_maps_are_those_of_torchmetrics():
    wanted, found = expected(), measure([sum(SHARES)], TABLES)
    assert found.pop("f1_score") == pytest.approx(
        (maps()[0].argmax(-1) == maps()[1]).double().mean().item()
    )
    assert found == pytest.approx(wanted, rel=1e-6)
    scalars = [value for key, value in wanted.items() if "/" not in key]
    assert len(set(scalars)) == len(scalars) == 7


@pytest.mark.matrix
def test_ranks_with_unequal_numbers_of_maps_have_the_same_means():
    wanted = expected()
    for found in run_ranks(2, measure, SHARES, TABLES):
        found.pop("f1_score")
        assert found == pytest.approx(wanted, rel=1e-6)


def test_places_without_a_class_are_left_out():
    logits, targets = maps()
    draw = np.random.default_rng(0)
    void, missing = draw.random((2, *targets.shape)) < 0.2
    given = targets.masked_fill(torch.from_numpy(void), 255)
    given = given.masked_fill(torch.from_numpy(missing), -100)
    tables = {"mean_iou": {"ignore_index": 255}, "dice_score": {"ignore_index": 255}}
    collected = build(MAPS, tables)
    collected.update(logits, given)
    labels, right, kept = logits.argmax(-1).numpy(), targets.numpy(), ~(void | missing)
    ious, dices = [], []
    for index in range(len(targets)):
        p, t = labels[index][kept[index]], right[index][kept[index]]
        both = np.array([((p == c) & (t == c)).sum() for c in range(CLASSES)])
        sizes = np.array([(p == c).sum() + (t == c).sum() for c in range(CLASSES)])
        ious.append(np.mean([b / (s - b) for b, s in zip(both, sizes, strict=True) if s]))
        dices.append(np.mean([2 * b / s for b, s in zip(both, sizes, strict=True) if s]))
    found = collected.compute()
    assert found == {
        "mean_iou": pytest.approx(np.mean(ious), rel=1e-5),
        "dice_score": pytest.approx(np.mean(dices), rel=1e-5),
    }
    with pytest.raises(DataError, match='metric "mean_iou" got the target 255'):
        build(MAPS, {"mean_iou": {}}).update(logits, given)


def test_masks_of_one_class_have_two():
    logits, targets = torch.randn(3, 1, 4, 4), torch.rand(3, 4, 4).round()
    collected = build(MASKS, {"mean_iou": {"include_background": False}})
    collected.update(logits, targets)
    right = segmentation.mean_iou(
        (logits > 0).long().squeeze(1), targets.long(), 2, False, input_format="index"
    )
    assert collected.compute() == {"mean_iou": pytest.approx(right.mean().item())}


def test_an_output_that_is_nan_makes_means_of_maps_nan():
    collected = build(MAPS, {"mean_iou": {}})
    logits, targets = maps()
    logits[2, 1, 1, 0] = math.nan
    collected.update(logits, targets)
    assert math.isnan(collected.compute()["mean_iou"])


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        ((5, 3), (5,), r"needs a map of classes in each sample, and targets have the shape \[5\]"),
        ((2, 3, 4, 5), (2, 4, 5), r"outputs \[2, 3, 4, 5\], targets \[2, 4, 5\]"),
        ((2, 5, 4, 5), (2, 4, 5), r"outputs \[2, 5, 4, 5\], targets \[2, 4, 5\]"),
    ],
)
def test_what_is_no_map_is_refused(logits, targets, message):
    with pytest.raises(DataError, match=message):
        build(MAPS, {"mean_iou": {}}).update(torch.zeros(logits), torch.zeros(targets).long())


def test_tasks_without_maps_refuse_means_over_maps():
    config = metrics["mean_iou"]()
    ((key, message, _),) = config.mismatches(Outputs("multiclass", 4))
    assert (key, message) == (
        "name",
        '"mean_iou" needs a map of classes in each sample, not one class',
    )
    assert not list(config.mismatches(MAPS))


PLUGIN = """
from typing import Literal

import numpy as np
import torch

from trainer.plugins import DatasetSource, Model, ModelConfig, models, sources


class Spots:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        image = np.random.default_rng(index).normal(size=(2, 5, 6)).astype(np.float32)
        return {"image": image, "labels": (image[0] > 0.5).astype(np.int64)}


@sources.register
class SpotsSource(DatasetSource):
    name: Literal["spots_of_maps"] = "spots_of_maps"

    def build(self, split):
        return Spots()


class Pixels(Model):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, image):
        return self.layer(image)


@models.register
class PixelsConfig(ModelConfig):
    name: Literal["pixels_of_maps"] = "pixels_of_maps"

    def build(self, kernels):
        return Pixels()
"""
RECIPE = """
[run]
steps = 1
[task]
name = "supervised"
class_dim = 1
[plugins]
modules = ["maps_plugin"]
[model]
name = "pixels_of_maps"
[data]
global_batch = 4
micro_batch = 4
[[data.sources]]
name = "spots_of_maps"
[[data.sources]]
name = "spots_of_maps"
split = "validation"
[schedule]
name = "constant"
[precision]
compute = "fp32"
[evaluate]
steps = 0
[[evaluate.metrics]]
name = "mean_iou"
per_class = true
"""


@pytest.mark.usefixtures("forgotten_plugins")
def test_modules_that_give_classes_first_are_measured(tmp_path, monkeypatch):
    (tmp_path / "maps_plugin.py").write_text(PLUGIN)
    (tmp_path / "r.toml").write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = load_recipe(tmp_path / "r.toml", []).recipe
    del sys.modules["maps_plugin"]
    parts = assemble(recipe, World(rank=0, world_size=1, local_rank=0, local_world_size=1), CPU)
    found = validate(parts)
    dataset = recipe.data.sources[1].build("validation")
    samples = [dataset[index] for index in range(len(dataset))]
    images, labels = (
        torch.from_numpy(np.stack([each[name] for each in samples])) for name in ("image", "labels")
    )
    with torch.no_grad():
        logits = parts.model(images)
    assert logits.shape == (10, 3, 5, 6)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    values = segmentation.mean_iou(
        logits.argmax(1), labels, 3, per_class=True, input_format="index"
    )
    mean = values.masked_fill(values == -1, math.nan).nanmean(0).tolist()
    right = {f"mean_iou/{name}": pytest.approx(x, rel=1e-5) for name, x in enumerate(mean)}
    assert found == {"loss": pytest.approx(loss.item(), rel=1e-5), **right}
    split = parts.splits[0]
    batch = next(iter(split.batches))
    kept = split.task.output_record(batch)
    with torch.no_grad():
        split.task.forward(parts.model, batch, kept)
    rows = split.task.predict(batch, kept, recipe.task.outputs(recipe.loss))
    assert [row["label"] for row in rows] == logits[: len(rows)].argmax(1).tolist()
