"""A run that moves between numbers of ranks sees the same samples."""

import pytest

from tests.train.processes import finish, rows, start, write_recipe


@pytest.mark.matrix
def test_a_run_moves_between_numbers_of_ranks(tmp_path):
    """2 ranks, then 1, then 4, then 2: the samples are the same, so are the losses to 1e-6."""
    settings = ["schedule.name=constant", "precision.compute=fp32", "optimizer.lr=1e-3"]
    reference = write_recipe(tmp_path / "reference", 20)
    assert finish(start(reference, 1, overrides=settings)) == [0]
    recipe = write_recipe(tmp_path / "moved", 20)
    for attempt, (world, steps) in enumerate([(2, 5), (1, 10), (4, 15), (2, 20)]):
        until = [*settings, f"run.steps={steps}"]
        assert finish(start(recipe, world, attempt, until)) == [0] * world
    moved, expected = rows(tmp_path / "moved"), rows(tmp_path / "reference")
    for key in ("step", "tokens"):
        assert [row[key] for row in moved] == [row[key] for row in expected]
    losses = [row["loss"] for row in moved]
    assert losses == pytest.approx([row["loss"] for row in expected], abs=1e-6)
