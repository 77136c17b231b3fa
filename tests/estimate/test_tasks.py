"""Estimates of tasks that know no tokens."""

import pytest

from trainer.engine.core.errors import RecipeError
from trainer.engine.data.tables import Data
from trainer.engine.estimate.plan import make_run_plan
from trainer.engine.estimate.search import search
from trainer.engine.recipe.load import load_recipe
from trainer.engine.tasks.tables import tasks


@pytest.fixture
def recipe(pytestconfig, forgotten_plugins):
    return load_recipe(pytestconfig.rootpath / "recipes/supervised_debug.toml", world=2).recipe


def test_the_formula_counts_samples_of_a_module_and_positions_of_a_language_model(
    recipe, monkeypatch
):
    monkeypatch.setattr(type(recipe.model), "flops_per_token", lambda self, length: 7.0)
    assert make_run_plan(recipe, 2, 8).formula_flops == 7.0 * recipe.data.global_batch
    data = Data(seq_len=48)
    found = {name: tasks[name].model_construct().positions(data) for name in tasks}
    assert found["supervised"] == 1
    assert found["language_modeling"] == found["sequence_classification"] == 48
    assert found["preference"] == found["reward"] == 96


def test_the_search_refuses_a_module_of_a_plugin(recipe):
    with pytest.raises(RecipeError, match='the task "supervised" trains a module of a plugin'):
        search(recipe, 2, "h100", 80 * 2**30, 8)
