"""Every test belongs to `make test` or to one part of `make test-all`; a change runs its own."""

import re

import pytest

from tests.architecture.sources import ROOT
from tests.conftest import pytest_collection_modifyitems
from tests.rotation import (
    CELLS,
    PARTS,
    Part,
    find_changes,
    is_below,
    next_cells,
    read_parts,
    select,
)

READ, BUDGET = read_parts()


def part(number, minutes=4, packages=()):
    return Part(
        number, f"group {number}", (1, 1), ("tests/x",), (), "matrix", packages, minutes, {}
    )


def numbers(chosen):
    return [[part.number for part in parts] for parts in chosen]


def test_there_are_at_most_24_parts_of_at_most_ten_minutes():
    assert len(READ) <= 24
    assert max(part.minutes for part in READ) <= 10


def test_every_file_of_tests_belongs_to_one_group_of_parts():
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert files
    for file in files:
        groups = {
            part.group
            for part in READ
            if part.marker == "matrix"
            and is_below(file, part.paths)
            and not is_below(file, part.ignored)
        }
        assert len(groups) == 1, f"{file}: {groups or 'no part'}"


def test_a_group_s_parts_are_all_its_shards():
    for name in {part.group for part in READ}:
        shards = [part.shard for part in READ if part.group == name]
        assert shards == [(k + 1, len(shards)) for k in range(len(shards))]


def test_make_test_runs_what_is_not_marked():
    """The parts run `-m matrix`: together, and with this, everything."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(
        r"^test: .*\n\t\$\(BIN\)/python -m pytest -n 2 --dist worksteal$", makefile, re.M
    )
    assert "-m 'not matrix'" in (ROOT / "pyproject.toml").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "\nmake test\n" in readme
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text("utf-8")


@pytest.mark.parametrize(
    ("last", "changed", "expected"),
    [
        (0, [], [[], [1, 2]]),
        (4, [], [[], [5, 1]]),  # after the last comes the first
        (0, ["engine/a/x.py", "engine/a/y.py", "kernels/z.py"], [[4, 2], [1, 3]]),
        (0, ["engine/ab.py"], [[], [1, 2]]),
        (3, None, [[4, 5, 1], [2, 3]]),  # unknown: everything changed
    ],
)
def test_a_change_runs_its_own_parts_and_the_next_ones(last, changed, expected):
    packages = [(), ("kernels",), (), ("engine/a",), ()]
    parts = [part(number + 1, packages=packages[number]) for number in range(5)]
    assert numbers(select(parts, BUDGET, last, changed)) == expected


def test_the_parts_of_a_change_stay_within_the_minutes_of_all():
    parts = [part(number, 6, ("engine",)) for number in (1, 2, 3, 4)]
    assert numbers(select(parts, BUDGET, 0, ["engine/x.py"])) == [[1], [2, 3]]
    for last in range(len(READ)):
        chosen = [part for parts in select(READ, BUDGET, last, None) for part in parts]
        assert BUDGET.before + sum(part.minutes for part in chosen) <= BUDGET.total == 35


def test_a_commit_that_git_does_not_know_means_that_everything_changed():
    assert find_changes("0" * 40) is None


def test_the_state_of_the_rotation_is_a_commit_a_part_and_a_cell():
    state = (PARTS.parent / "rotation.toml").read_text("utf-8")
    assert re.search(r'^commit = "[0-9a-f]{40}"\npart = \d+\ncells = \d+\n\Z', state, re.M)


def test_the_next_cells_come_only_after_a_change_that_ran_some():
    cells = next(part for part in READ if part.group == "cells")
    assert cells.paths == ("tests/cells",)
    assert next_cells(300, [part(1), part(2)]) == 300
    assert next_cells(300, [part(1), cells]) == 400
    assert next_cells(CELLS - 100, [cells]) == 0


@pytest.mark.parametrize("shard", ["1/3", "2/3", "3/3"])
def test_shards_are_every_third_test(shard):
    class Config:
        hook = type("Hook", (), {"pytest_deselected": lambda items: gone.extend(items)})

        def getoption(self, name):
            return shard

    gone, items = [], list(range(8))
    pytest_collection_modifyitems(Config(), items)
    assert items == list(range(int(shard[0]) - 1, 8, 3))
    assert sorted(gone + items) == list(range(8))
