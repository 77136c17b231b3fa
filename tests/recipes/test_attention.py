"""Which tasks, plans and kernels take bidirectional attention."""

from types import SimpleNamespace
from typing import ClassVar, Literal

import pytest

from trainer.engine.core.errors import RecipeError
from trainer.engine.inference.generate import generate
from trainer.engine.recipe.load import load_recipe
from trainer.engine.tasks.language_modeling.config import LanguageModeling
from trainer.engine.tasks.tables import tasks
from trainer.kernels.registry import Implementation, kernels
from trainer.model_zoo.heads import HeadSettings
from trainer.model_zoo.llama3.config import Llama3Config

BASE = """
[run]
steps = 1
[model]
attention = "bidirectional"
[data]
seq_len = 64
global_batch = 4
micro_batch = 1
[[data.sources]]
name = "synthetic"
"""


class Labels(LanguageModeling):
    """A task with a head that looks in both directions."""

    name: Literal["labels"] = "labels"
    attention: ClassVar[tuple[str, ...]] = ("bidirectional",)

    def adapt_model(self, config):
        return config.with_head(HeadSettings(outputs=3))


@pytest.fixture
def validate(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks._configs, "labels", Labels)
    monkeypatch.setitem(tasks._places, "labels", "tests.recipes.test_attention:Labels")
    own = Implementation("own:attention")
    monkeypatch.setitem(kernels["attention"]._known, "own", own)
    path = tmp_path / "recipe.toml"
    path.write_text(BASE)

    def validate(*overrides, world=None):
        return load_recipe(path, overrides, world).recipe

    return validate


LABELS = 'task.name="labels"'


def test_a_task_gives_the_model_its_head_which_the_written_recipe_leaves_out(validate):
    recipe = validate(LABELS, "evaluate.interval=0")
    assert recipe.model.task_head == HeadSettings(outputs=3)
    written = recipe.model_dump(mode="json")
    assert "task_head" not in written["model"]
    assert type(recipe).model_validate(written).model.task_head == HeadSettings(outputs=3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), 'the task "language_modeling" does not support "bidirectional"'),
        ((LABELS, "model.attention=causal"), 'the task "labels" does not support "causal"'),
        ((LABELS, 'kernels.attention="own"'), '"own" sees earlier positions alone'),
        (
            (LABELS, "parallel.context=2", 'parallel.context_exchange="ring"'),
            "a ring attends to earlier positions alone",
        ),
    ],
)
def test_what_cannot_attend_so_is_refused_by_name(validate, overrides, message):
    with pytest.raises(RecipeError) as raised:
        validate(*overrides, "evaluate.interval=0", world=2)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Llama3Config(attention="bidirectional"), "attention is bidirectional"),
        (Llama3Config().with_head(HeadSettings(outputs=2)), "head for sequence_classification"),
    ],
)
def test_such_models_generate_no_text(config, message):
    opened = SimpleNamespace(recipe=SimpleNamespace(model=config))
    with pytest.raises(RecipeError, match=message):
        generate(opened, ["x"], max_new_tokens=1)
