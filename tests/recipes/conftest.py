"""Recipes written to a temporary folder, and what is wrong with them."""

from pathlib import Path

import pytest

from tests.commands import run_trainer
from trainer.engine.core.errors import RecipeError
from trainer.engine.recipe.load import load_recipe

SAMPLE_PLUGIN = Path(__file__).parents[1] / "plugin"


@pytest.fixture
def write(tmp_path):
    """Write a file of the test's folder and return its path."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture
def problems(write, tmp_path, monkeypatch):
    """Load a text as a recipe, with the test's folder as working directory; return its problems."""
    monkeypatch.chdir(tmp_path)

    def problems(text, *overrides, world=None):
        write("recipe.toml", text)
        with pytest.raises(RecipeError) as caught:
            load_recipe("recipe.toml", overrides, world)
        return caught.value.problems

    return problems


@pytest.fixture
def load(write, tmp_path, monkeypatch):
    """Load a text as a recipe, with the test's folder as working directory."""
    monkeypatch.chdir(tmp_path)

    def load(text, *overrides, world=None):
        write("recipe.toml", text)
        return load_recipe("recipe.toml", overrides, world)

    return load


@pytest.fixture
def command(tmp_path):
    """Run a command line in a process of its own that can import the sample package."""

    def command(*arguments, recipe=None):
        if recipe is not None:
            (tmp_path / "recipe.toml").write_text(recipe)
        return run_trainer(*arguments, folder=tmp_path, path=[SAMPLE_PLUGIN, tmp_path / "site"])

    return command
