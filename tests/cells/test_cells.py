"""The numbered cells: the same in each process, of all kinds; and the next 100 of them."""

import tomllib
from collections import Counter
from datetime import date
from unittest.mock import patch

import pytest

from tests.cells.draw import CELLS, SCHEDULES, draw
from tests.cells.record import add_results, describe, parse_ranges, read_entries, render
from tests.cells.run import read_results, run_cell, run_cells
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


def test_the_record_holds_the_newest_result_of_each_cell(tmp_path):
    path = tmp_path / "passed.toml"
    assert describe(path) == "no cell of this version of draw.py is recorded"
    add_results(path, {0: True, 1: True, 2: False, 4: True}, date(2026, 1, 2), "2.13.0")
    add_results(path, {1: False, 2: True}, date(2026, 1, 3), "2.13.0")
    add_results(path, {7: True}, date(2026, 1, 4), "2.14.0")
    assert describe(path).splitlines() == [
        "3 of 2000 cells passed with torch 2.13.0 until 2026-01-03: 0, 2, 4; failed: 1",
        "1 of 2000 cells passed with torch 2.14.0 until 2026-01-04: 7; failed: none",
    ]
    assert render([5, 0, 1, 2]) == "0-2, 5"
    assert [*parse_ranges("0-2, 5")] == [0, 1, 2, 5]
    with patch("tests.cells.record.DIGEST", "another"):
        assert read_entries(path) == []


@pytest.mark.matrix
def test_cells_are_valid_and_of_all_kinds():
    cells = [draw(number) for number in range(0, CELLS, 20)]
    assert not any(check(cell.recipe, cell.world) for cell in cells)
    recipes = [cell.recipe for cell in cells]
    assert len(Counter(recipe.model.name for recipe in recipes)) == 12
    assert len(Counter(recipe.task.name for recipe in recipes)) == 8
    assert {recipe.data.packing for recipe in recipes} == {"concat", "documents", "none", "ragged"}
    assert {recipe.memory.recompute for recipe in recipes} == {
        *("none", "full", "every_n", "selective", "budget")
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
    results = tmp_path / "cells.txt"
    with patch("tests.cells.run.COMPUTE", "tests.check.bugs:forget_replicated"):
        assert len(run_cells([number], results, 1)) == 1
    assert f"again: python -m tests.cells run {number}" in capsys.readouterr().out
    assert read_results(results) == {number: False}
    assert run_cells([number], results, 1) == []
    assert read_results(results) == {number: True}
    with patch("tests.cells.run.COMPUTE", "nothing:is_run"):
        assert run_cells([number], results, 1) == []


@pytest.mark.matrix
@pytest.mark.parametrize("number", NEXT)
def test_a_cell_equals_one_process(number):
    failure = run_cell(number)
    assert not failure, failure
