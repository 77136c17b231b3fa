"""From options to points."""

from __future__ import annotations

import re

import pytest

from trainer.engine.core.errors import RecipeError
from trainer.engine.sweep.points import make_points, split_values


def settings(grids: list[str], zips: list[str] | None = None) -> list[tuple[str, ...]]:
    return [point.settings for point in make_points(grids, zips or [])]


def problems(grids: list[str], zips: list[str] | None = None) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        make_points(grids, zips or [])
    return caught.value.render().splitlines()


def test_grids_make_their_product_and_zips_go_together() -> None:
    found = settings(["a.lr=1,2"], ["b=x,y", "c.d=3,4"])
    assert found == [
        ("a.lr=1", "b=x", "c.d=3"), ("a.lr=1", "b=y", "c.d=4"),
        ("a.lr=2", "b=x", "c.d=3"), ("a.lr=2", "b=y", "c.d=4"),
    ]  # fmt: skip


def test_commas_in_brackets_and_quotes_belong_to_the_value() -> None:
    assert split_values('[1, 2], {a = 1, b = 2},"x,y", \'z,\',plain') == [
        "[1, 2]", "{a = 1, b = 2}", '"x,y"', "'z,'", "plain"
    ]  # fmt: skip


def test_ranges_are_spaced_evenly_or_by_a_factor() -> None:
    assert settings(["lr=log:1e-4..1e-2:5"]) == [
        ("lr=0.0001",), ("lr=0.0003162",), ("lr=0.001",), ("lr=0.003162",), ("lr=0.01",)
    ]  # fmt: skip
    assert settings(["n=lin:2..8:3"]) == [("n=2",), ("n=5",), ("n=8",)]
    assert settings(["x=lin:0.5..-0.5:3"]) == [("x=0.5",), ("x=0.0",), ("x=-0.5",)]


def test_names_tell_the_points_and_depend_on_their_settings_alone() -> None:
    points = make_points(["optimizer.lr=1e-4,3e-4", "model.dim=64"], [])
    assert [point.name for point in points] == ["lr-1e-4_dim-64", "lr-3e-4_dim-64"]
    more = make_points(["optimizer.lr=9,3e-4", "model.dim=8,64"], [])
    assert points[1] in more
    [point] = make_points(["a.x=1", "b.x=2"], [])
    assert point.name == "a.x-1_b.x-2"


def test_names_are_safe_and_unique_whatever_the_values_are() -> None:
    hostile = ["../../etc", "'a b'", '"a/b"', '"a?b"', "[1,2]", "x" * 300, "x" * 301, "ü"]
    names = [point.name for point in make_points([f"k={','.join(hostile)}"], [])]
    assert len({*names}) == len(hostile)
    assert [name for name in names if not re.fullmatch(r"\w[\w.-]{0,99}", name)] == []


def test_every_mistake_is_reported_at_once() -> None:
    assert problems(["lr", "b=1,,2", "c=3,3", "run.name=x"], ["d=1,2", "e=1"]) == [
        "error: --grid: lr: expected KEY=VALUE,VALUE,..., such as optimizer.lr=1e-4,3e-4",
        "error: --grid: b=1,,2: a value is missing between two commas",
        'error: --grid: c=3,3: "3" is there twice',
        "error: --grid: run.name=x: a sweep names its runs itself; give --dir for its folder",
        "error: --zip: zipped keys need equally many values: d has 2, e has 1",
    ]


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ([], "nothing to vary"),
        (["a=1", "a=2"], "this key is varied twice"),
        (["a=lin:1..200:200", "b=lin:1..200:200"], "40,000 points are more than 10,000"),
        (["a=log:0..1:3"], "a logarithmic range has positive ends"),
        (["a=log:1..2:1"], "at least 2 values"),
        (["a=log:1-2"], "expected log:LOW..HIGH:COUNT"),
        (["a=lin:1..inf:3"], "expected two numbers"),
    ],
)
def test_what_makes_no_sweep_is_refused(grids: list[str], message: str) -> None:
    assert message in problems(grids)[0]
