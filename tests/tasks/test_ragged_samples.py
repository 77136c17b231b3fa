"""A plugin's module on samples of unequal lengths: flat values beside padded ones, and two ranks.

Components are registered in processes of their own.
"""

from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.distributed import run_ranks
from tests.train.plans import BASE, assembled, train
from trainer import plugins
from trainer.engine.core.errors import DataError
from trainer.engine.data.collate import concatenate_samples
from trainer.engine.recipe.schema import Recipe
from trainer.engine.train.evaluate import validate

COUNT, LARGEST = 26, 12


def draw_cloud(index):
    """Return points in the plane, the height of each, and whether there are many."""
    draw = np.random.default_rng(index)
    size = int(draw.integers(1, LARGEST + 1))
    points = draw.normal(size=(size, 2)).astype("f4")
    many = np.int64(size > LARGEST // 2)
    return {"points": points, "heights": points.sum(1), "labels": many, "size": np.int64(size)}


class Cloud(plugins.Model):
    """Looks at each point beside all others of its sample, and tells each height or the label."""

    def __init__(self, kernels, by_point):
        super().__init__()
        self.enter, self.leave = nn.Linear(2, 8), nn.Linear(8, 1 if by_point else 2)
        self.attention, self.by_point = kernels.in_both_directions().attention, by_point

    def forward(self, points, size, lengths=None):
        x = self.enter(points)
        if lengths is None:  # padded: the slow way, a sample at a time
            every = [self.attend(row[:n].unsqueeze(0))[0] for row, n in zip(x, size, strict=True)]
            if self.by_point:
                return self.leave(torch.stack(every)).squeeze(-1)
            return self.leave(torch.stack([row.mean(0) for row in every]))
        x = self.attend(x.unsqueeze(0), lengths)[0]
        if self.by_point:
            return self.leave(x).squeeze(-1)
        return self.leave(plugins.sum_by_sample(x, lengths) / lengths.counts.unsqueeze(1))

    def attend(self, x, mask=None):
        heads = x.unflatten(-1, (2, 4))
        return x + self.attention(heads, heads, heads, mask).flatten(-2)


def register():
    @plugins.models.register
    class CloudConfig(plugins.ModelConfig):
        takes_lengths: ClassVar = True
        name: Literal["cloud"] = "cloud"
        by_point: bool = False

        def build(self, kernels):
            return Cloud(kernels, self.by_point)

    @plugins.losses.register
    class HeightsConfig(plugins.LossConfig):
        tasks: ClassVar = ("supervised",)
        name: Literal["heights"] = "heights"

        def build_criterion(self):
            return plugins.Elementwise(F.mse_loss, "heights")

    @plugins.sources.register
    class Clouds(plugins.DatasetSource):
        name: Literal["clouds"] = "clouds"

        def build(self, split):
            return [draw_cloud(index) for index in range(COUNT)]


def recipe_of(packing, *, by_point=False, micro_batch=3):
    data = {"global_batch": 8, "micro_batch": micro_batch, "packing": packing}
    data |= {"sources": [{"name": "clouds"}], "validation_fraction": 0.3}
    task = {"name": "supervised", "targets": ["labels", "heights"]}
    fields = ["points", "heights"]
    task |= {"ragged": fields} if packing == "ragged" else {"padding": dict.fromkeys(fields, 0)}
    base = {name: BASE[name] for name in ("run", "optimizer", "schedule", "precision", "evaluate")}
    return Recipe.model_validate(
        {
            **base,
            "model": {"name": "cloud", "by_point": by_point},
            "task": task,
            "loss": {"name": "heights" if by_point else "cross_entropy"},
            "data": data,
        }
    )


def numbers_of(cases):
    register()
    found = []
    for case in cases:
        parts = assembled(recipe_of(**case))
        losses, norms = train(parts)
        found.append([*losses, *norms, validate(parts)["loss"]])
    return found


def test_samples_are_trained_as_padded_ones_are_and_on_two_ranks():
    ragged = [{"packing": "ragged", "micro_batch": size} for size in (3, 1)]
    by_point = [{**case, "by_point": True} for case in ragged]
    (found,) = run_ranks(1, numbers_of, [{"packing": "none"}, *ragged, *by_point])
    expected = [found[0], found[0], found[3], found[3]]
    (two, _) = run_ranks(2, numbers_of, [*ragged, *by_point])
    for others in (found[1:], two):
        for other, wanted in zip(others, expected, strict=True):
            assert other == pytest.approx(wanted, rel=1e-5)


def predict_and_compare():
    """Return the loss of a step of all points, the same a sample at a time, and predictions."""
    register()
    parts = assembled(recipe_of("ragged", by_point=True))
    model, task, (batch, *_) = parts.model, parts.step.task, next(parts.loader.steps(0))
    fields = [batch.fields[x].split(batch.ragged.lengths) for x in ("points", "heights")]
    rows = zip(*fields, strict=True)
    with torch.no_grad():
        errors = [(model(x[None], [len(x)])[0] - heights).square() for x, heights in rows]
        record = task.output_record(batch)
        task.forward(model, batch, record)
    predictions = task.predict(batch, record, None)
    loss = parts.step.accumulate([batch]).loss.item()
    return loss, torch.cat(errors).mean().item(), predictions, batch.ragged.lengths


def test_a_loss_of_positions_is_their_mean_and_each_has_a_prediction():
    loss, expected, predictions, lengths = run_ranks(1, predict_and_compare)[0]
    assert loss == pytest.approx(expected, rel=1e-5)
    assert [len(row["outputs"]) for row in predictions] == list(lengths)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": np.ones((3, 2))}, r"shapes x \(3, 2\), y None"),
        ({"x": np.ones((3, 2)), "y": np.ones(2)}, r"shapes x \(3, 2\), y \(2,\)"),
        ({"x": np.ones((0, 2)), "y": np.ones(0)}, r"shapes x \(0, 2\), y \(0,\)"),
        ({"x": np.float64(1), "y": np.float64(1)}, r"shapes x \(\), y \(\)"),
        ({"x": np.ones((2, 3)), "y": np.ones(2)}, r'"x" of a data set .* \(2,\) and \(3,\)'),
        ({"x": np.ones((2, 2)), "y": np.ones(2), "lengths": 2}, '"lengths"'),
    ],
)
def test_samples_that_are_not_ragged_are_refused(fields, message):
    sample = {"x": np.ones((4, 2)), "y": np.ones(4)}
    with pytest.raises(DataError, match=message):
        concatenate_samples([sample, fields], ["x", "y"])
