"""A learning rate that follows the score, against torch's schedule on the same scores."""

import shutil

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.cases import also
from tests.distributed import run_ranks
from tests.train.processes import complaints, finish, rows, start, tensors, write_recipe
from tests.train.test_replay import replayed
from tests.train.test_stops import stop_at
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.optim.plateau import Plateau
from trainer.engine.train.parts import Position
from trainer.engine.train.tables import Evaluate

STEPS, PEAK, FACTOR = 12, 0.3, 0.5
PLATEAU = [
    "schedule.name=plateau",
    "schedule.warmup_steps=2",
    f"schedule.factor={FACTOR}",
    "schedule.patience=0",
    "schedule.threshold=0.015",
    f"optimizer.lr={PEAK}",  # so large that the validation loss goes up and down
    "evaluate.interval=1",
    "precision.compute=fp32",
    "checkpoint.interval=1",
    "checkpoint.keep=99",
    "resilience.spike=off",
]


def curves(folder):
    """Return what a run computed at each step, and the state that its checkpoints keep."""
    train = [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows(folder)]
    found = find_checkpoint(folder / "run").manifest
    return train, [row["loss"] for row in rows(folder, "eval")], found.extra["schedule"]


def rates_of_torch(scores, warmup=2):
    """Return the rate of each step of a run that is evaluated after every step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = ReduceLROnPlateau(optimizer, factor=FACTOR, patience=0, threshold=0.015, eps=0.0)
    rates = [PEAK * (step + 1) / (warmup + 1) for step in range(warmup)]
    for score in scores[warmup - 1 : -1]:
        scheduler.step(score)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("plateau") / "reference"
    assert finish(start(write_recipe(folder, STEPS), overrides=PLATEAU)) == [0]
    return folder


def reduced(folder):
    """Return the steps after whose evaluation the rate was lowered."""
    rates = [row["lr"] for row in rows(folder)]
    return [step for step in range(3, STEPS) if rates[step] < rates[step - 1]]


def test_rates_are_those_of_torch_for_the_scores_of_the_run(reference):
    train, scores, _ = curves(reference)
    assert [lr for *_, lr in train] == pytest.approx(rates_of_torch(scores), rel=1e-9)
    assert 2 <= len(reduced(reference)) < STEPS - 4


def interrupted(reference, folder, step):
    """Return the recipe of a run that was killed after a step of the reference."""
    recipe = write_recipe(folder, STEPS)
    shutil.copytree(reference / "run", folder / "run", symlinks=True)
    for path in (folder / "run" / "checkpoints").glob("step-*"):
        if int(path.name[-8:]) > step:
            shutil.rmtree(path)
    return recipe


def assert_equal(folder, reference):
    assert curves(folder) == curves(reference)
    final = tensors(folder)[1]
    assert all(final[name].equal(tensor) for name, tensor in tensors(reference)[1].items())


@pytest.mark.parametrize("offset", [0, *also(-1, 1)])
def test_a_run_resumes_bit_for_bit_around_a_reduction(reference, tmp_path, offset):
    recipe = interrupted(reference, tmp_path / "run", reduced(reference)[0] + offset)
    assert finish(start(recipe, overrides=PLATEAU)) == [0]
    assert_equal(tmp_path / "run", reference)


def test_a_checkpoint_from_before_the_evaluation_that_lowers_the_rate(reference, tmp_path):
    step = reduced(reference)[0]
    recipe = interrupted(reference, tmp_path / "run", step - 1)
    assert stop_at(recipe, "train.evaluate:x2:sleep2", settings=PLATEAU) == [75]
    saved = find_checkpoint(tmp_path / "run" / "run").manifest
    assert (saved.step, saved.extra["unevaluated"]) == (step, True)
    assert saved.extra["schedule"]["ratio"] == 1.0
    assert finish(start(recipe, attempt=1, overrides=PLATEAU)) == [0]
    assert_equal(tmp_path / "run", reference)


def test_a_replayed_step_has_the_rates_of_the_run(reference, tmp_path):
    step = max(each for each in reduced(reference) if each <= STEPS - 2)
    recipe = interrupted(reference, tmp_path / "run", step - 2)
    row = rows(tmp_path / "run")[step + 1]
    ((loss, _, start_step, _),) = run_ranks(1, replayed, recipe, PLATEAU, f"step:{step + 2}")
    assert (loss, start_step) == (row["loss"], step - 2)


@pytest.mark.parametrize("direction", ["min", *also("max")])
def test_two_ranks_train_as_one(tmp_path, direction):
    found = []
    for world in (1, 2):
        recipe = write_recipe(tmp_path / str(world), 8)
        settings = [*PLATEAU, "optimizer.name=sgd", "optimizer.lr=0.1", "schedule.patience=0"]
        settings += ["schedule.threshold=0.03", f"evaluate.direction={direction}"]
        assert finish(start(recipe, world, overrides=settings)) == [0] * world
        found.append(curves(tmp_path / str(world)))
    (one, one_scores, _), (two, two_scores, _) = found
    assert [lr for *_, lr in one] == [lr for *_, lr in two]
    assert len({lr for *_, lr in one}) > 3
    assert [row[1:3] for row in two] == [pytest.approx(row[1:3], rel=1e-5) for row in one]
    assert two_scores == pytest.approx(one_scores, rel=1e-6)


def test_a_schedule_whose_score_is_never_measured_is_refused(tmp_path):
    recipe = write_recipe(tmp_path / "run", STEPS)
    assert finish(start(recipe, overrides=[*PLATEAU, "data.validation_fraction=0.0"])) == [2]
    assert "nothing is held out; raise data.validation_fraction" in complaints(recipe)


def test_another_metric_starts_the_count_again():
    class Parts:
        schedule = Plateau(patience=0, factor=FACTOR)
        evaluate = Evaluate(metric="loss")

    position = Position()
    for position.step, loss in enumerate([3.0, 2.0, 2.5], 1):
        position.record_score(Parts, {"loss": loss, "books.loss": 9.0})
    assert (position.schedule.best, position.schedule.ratio) == (2.0, FACTOR)
    Parts.evaluate = Evaluate(metric="books.loss")
    position.record_score(Parts, {"loss": 1.0, "books.loss": 9.0})
    assert (position.schedule.best, position.schedule.ratio) == (9.0, FACTOR)
