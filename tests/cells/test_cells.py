"""The numbered cells: the same in each process, of all kinds; and the next 100 of them."""

import tomllib
from collections import Counter
from unittest.mock import patch

import pytest

from tests.cells.draw import CELLS, SCHEDULES, draw
from tests.cells.run import read_record, run_cell, run_cells
from tests.distributed import CONTEXT
from tests.rotation import CELLS as ALL
from tests.rotation import CELLS_A_CHANGE, STATE
from trainer.engine.parallel.mesh import AXES
from trainer.engine.recipe.checks.checks import check

FIRST = tomllib.loads(STATE.read_text("utf-8"))["cells"]
NEXT = [(FIRST + number) % CELLS for number in range(CELLS_A_CHANGE)]


@pytest.fixture(scope="module", autouse=True)
def server():
    """Let the server of the other tests fork our ranks, with what they import."""
    process = CONTEXT.Process(target=int)
    process.start()
    process.join()


def test_a_number_is_one_cell():
    first = draw(5)
    draw.cache_clear()
    assert draw(5) == first
    assert draw(5) != draw(6)
    assert CELLS == ALL


@pytest.mark.matrix
def test_cells_are_valid_and_of_all_kinds():
    cells = [draw(number) for number in range(0, CELLS, 20)]
    assert not any(check(cell.recipe, cell.world) for cell in cells)
    recipes = [cell.recipe for cell in cells]
    assert len(Counter(recipe.model.name for recipe in recipes)) == 10
    assert len(Counter(recipe.task.name for recipe in recipes)) == 8
    assert {recipe.data.packing for recipe in recipes} == {"concat", "documents", "none", "ragged"}
    assert {recipe.memory.recompute for recipe in recipes} == {
        *("none", "full", "every_n", "selective")
    }
    for axis in (*AXES, "expert"):
        assert any(getattr(recipe.parallel, axis) > 1 for recipe in recipes), axis
    assert any(recipe.compile.enabled for recipe in recipes)
    assert any(recipe.lora.rank for recipe in recipes)
    assert {cell.world for cell in cells} >= {1, 2, 4, 8}
    assert {recipe.parallel.pipelining.schedule for recipe in recipes} <= {*SCHEDULES}


@pytest.mark.matrix
def test_a_cell_that_differs_prints_how_to_repeat_it(tmp_path, capsys):
    number = next(n for n in range(CELLS) if draw(n).recipe.parallel.degrees.tensor == 2)
    record = tmp_path / "cells.txt"
    with patch("tests.cells.run.COMPUTE", "tests.check.bugs:forget_replicated"):
        assert len(run_cells([number], record, 1)) == 1
    assert f"again: python -m tests.cells run {number}" in capsys.readouterr().out
    assert [*read_record(record)] == []
    assert run_cells([number], record, 1) == []
    assert [*read_record(record)] == [number]
    with patch("tests.cells.run.COMPUTE", "nothing:is_run"):
        assert run_cells([number], record, 1) == []


@pytest.mark.matrix
@pytest.mark.parametrize("number", NEXT)
def test_a_cell_equals_one_process(number):
    failure = run_cell(number)
    assert not failure, failure
