"""Regular expressions of recipes: matched in bounded time, and refused where that cannot be."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.docs.walk import ROOT
from tests.limits import limited
from trainer.engine.core.errors import RecipeError
from trainer.engine.core.text.expressions import ExpressionError, compile_expression, match_names
from trainer.engine.recipe.load import load_recipe

EVIL = r"(.+)+!"
PLACES = {
    "parallel.rules": f'parallel.rules=[{{match="{EVIL}", place={{tensor=0}}}}]',
    "optimizer.groups": f'optimizer.groups=[{{match="re:{EVIL}", lr=0.1}}]',
    "lora": f'lora={{rank=2, targets=["re:{EVIL}"]}}',
    "float8": f'precision.float8={{enabled=true, targets=["re:{EVIL}"]}}',
    "excluded": f'precision.float8={{enabled=true, exclude=["re:{EVIL}"]}}',
}


@pytest.mark.parametrize("place", list(PLACES))
def test_an_expression_that_could_take_for_ever_is_matched_at_once(place: str) -> None:
    with limited(cpu_seconds=20), suppress(RecipeError):  # it matches nothing
        load_recipe(ROOT / "recipes/llama3_debug.toml", [PLACES[place]])


@pytest.mark.parametrize(
    "text", [EVIL, r"(a|a)*b", r"(a*)*b", r"(?:a?){30}a{30}b", "(.*)" * 30 + "!"]
)
def test_matching_takes_time_in_proportion_to_the_name(text: str) -> None:
    with limited(64, cpu_seconds=10):
        assert not compile_expression(text).fullmatch("a" * 100_000)


def test_a_glob_of_many_stars_is_matched_at_once() -> None:
    with limited(64, cpu_seconds=10):
        assert not match_names("*a" * 500 + "b")("a" * 5000)


@pytest.mark.parametrize("text", [r"(?!a)b", r"(?<=a)b", r"(a)\1", r"(?P<x>a)(?P=x)", "a++"])
def test_what_has_no_such_bound_is_refused_with_the_reason(text: str) -> None:
    with pytest.raises(ExpressionError, match="could take for ever"):
        compile_expression(text)


def test_large_repetitions_are_refused() -> None:
    for text in ("(a{1000}){1000}", "((a{100}){100}){100}", "x{99999999}"):
        with limited(64, cpu_seconds=10), pytest.raises(ExpressionError):
            compile_expression(text)


@pytest.mark.parametrize(
    "text", [r"layers\.\d+\.(?:mlp|attention)\.\w+", r"(?i)NORM$", r"^\Aa\b[^.]+?"]
)
def test_common_syntax_is_known(text: str) -> None:
    compile_expression(text)
