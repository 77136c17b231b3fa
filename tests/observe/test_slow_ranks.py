"""Which rank makes the others wait."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.processes import complaints, finish, rows, start, write_recipe
from trainer.engine.observe.throughput import SlowRanks

DELAY = 0.2
ROWS = ["run.steps=5", "evaluate.interval=0", "checkpoint.interval=0"]


def judged(*rows_of_seconds: list[float]) -> tuple[list[dict[str, float]], list[str]]:
    """Return the columns of rows and the warnings for ranks' own seconds of a step of 1 s."""
    warnings: list[str] = []
    ranks = SlowRanks(None, warnings.append, local_forward=True)
    return [ranks._judge(own, 1.0) for own in rows_of_seconds], warnings


def test_a_rank_is_slow_when_it_stands_out_for_some_rows() -> None:
    slow, even = [0.1, 0.3, 0.1], [0.1, 0.11, 0.1]
    columns, warnings = judged(slow, slow)
    assert columns[0] == {
        "slowest_rank": 1,
        "rank_seconds_max": 0.3,
        "rank_seconds_median": 0.1,
    }
    assert warnings == []
    assert len(judged(slow, slow, slow, slow)[1]) == 1, "said once"
    assert judged(slow, slow, even, slow, slow)[1] == []
    assert judged(slow, slow, [0.1, 0.1, 0.3], [0.3, 0.1, 0.1])[1] == [], "another one each time"
    assert len(judged([0.1, 0.3], [0.1, 0.3], [0.1, 0.3])[1]) == 1, "one of two"


def test_a_difference_that_is_small_beside_the_step_is_none() -> None:
    assert judged(*[[0.001, 0.01, 0.001]] * 5)[1] == []


def test_one_process_is_not_compared() -> None:
    assert SlowRanks(None, print, local_forward=True).compare(1) == {}


def slow_data() -> None:
    from trainer.engine.data.loader import TurnLoader

    steps = TurnLoader.steps

    def late_steps(self: Any, first: int) -> Any:
        for item in steps(self, first):
            time.sleep(DELAY * (os.environ["RANK"] == "1"))
            yield item

    TurnLoader.steps = late_steps  # type: ignore[method-assign]


def slow_forward() -> None:
    from trainer.engine.tasks.task import Task

    forward = Task.forward

    def late_forward(*arguments: Any) -> Any:
        time.sleep(DELAY * (os.environ["RANK"] == "1"))
        return forward(*arguments)

    Task.forward = late_forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("before", "plan"),
    [(slow_data, "parallel.shard=2"), (slow_forward, "parallel.replicate=2")],
)
def test_a_rank_with_a_delay_is_named(tmp_path: Path, before: Any, plan: str) -> None:
    recipe = write_recipe(tmp_path / "slow")
    settings = [*ROWS, plan, *["parallel.shard=1"] * ("replicate" in plan)]
    assert finish(start(recipe, 2, overrides=settings, before=before)) == [0, 0], complaints(recipe)
    train = rows(recipe.parent)
    assert "slowest_rank" not in train[0]
    assert [row["slowest_rank"] for row in train[1:]] == [1] * 4
    assert min(row["rank_seconds_max"] for row in train[1:]) >= DELAY
