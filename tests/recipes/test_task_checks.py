"""The task names its loss and its packing, and what does not fit it is refused by name."""

from typing import Literal

import pytest

from trainer.engine.core.errors import RecipeError
from trainer.engine.recipe.checks.task_checks import check_task
from trainer.engine.recipe.load import load_recipe
from trainer.engine.tasks.tables import TaskConfig


def load(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(f"[run]\nsteps = 2\n{text}")
    return load_recipe(path).recipe


def problems(tmp_path, text):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text)
    return [(problem.key, problem.message) for problem in caught.value.problems]


def test_a_language_model_learns_the_next_token(tmp_path):
    recipe = load(tmp_path, "")
    assert (recipe.task.name, recipe.loss.name) == ("language_modeling", "cross_entropy")
    assert recipe.data.packing == "concat"


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ('[loss]\nname = "mse"', "loss.name", 'does not accept "mse"'),
        ("[loss]\nlabel_smoothing = 0.1", "loss.label_smoothing", "has no label_smoothing"),
        ("[loss]\nclass_weights = [1.0]", "loss.class_weights", "has no class_weights"),
    ],
)
def test_what_does_not_fit_the_task_is_refused(tmp_path, text, key, part):
    found = problems(tmp_path, text)
    assert [place for place, _ in found] == [key]
    assert part in found[0][1]


def test_an_unknown_task_is_named_with_those_that_exist(tmp_path):
    ((key, message),) = problems(tmp_path, '[task]\nname = "language_modelling"')
    assert key == "task.name"
    assert 'no task is named "language_modelling"; known: ' in message


class Labelled(TaskConfig):
    fields = ("text", "label")
    packings = ("concat",)
    name: Literal["labelled"] = "labelled"


SOURCE = '[[data.sources]]\nname = "jsonl"\npath = "a.jsonl"\n'


@pytest.mark.parametrize(
    ("text", "place", "message", "hint"),
    [
        (
            f'{SOURCE}fields = {{ txt = "body" }}',
            ("sources", 0, "fields", "txt"),
            "reads text, label",
            'did you mean "text"?',
        ),
        (
            f'{SOURCE}[[data.sources]]\nname = "text"\npath = "a"',
            ("sources", 1, "name"),
            'the "text" source has no field "label"',
            '"jsonl", "parquet" or "hf"',
        ),
        (
            '[[data.sources]]\nname = "synthetic"',
            ("sources", 0, "name"),
            'the "synthetic" source has no records',
            '"jsonl", "parquet" or "hf"',
        ),
        (
            f"{SOURCE}streaming = true",
            ("sources", 0, "streaming"),
            "encoded before training",
            "leave it out",
        ),
        (
            f"[data]\npad_to = 8\n{SOURCE}[parallel]\npipeline = 2",
            ("pad_to",),
            "rows of one length",
            "leave it out",
        ),
        (
            f"[data]\npad_to = 6\n{SOURCE}[parallel]\ncontext = 2",
            ("pad_to",),
            "6 is no multiple of 4",
            "8 is one",
        ),
    ],
)
def test_data_that_give_no_records_of_the_task_are_refused(tmp_path, text, place, message, hint):
    recipe = load(tmp_path, text).model_copy(update={"task": Labelled()})
    ((path, said, advice),) = list(check_task(recipe))
    assert path == ("data", *place)
    assert message in said
    assert hint in advice


def test_records_with_the_fields_of_the_task_fit(tmp_path):
    text = f'[data]\npad_to = 8\n{SOURCE}fields = {{ text = "body" }}'
    recipe = load(tmp_path, text).model_copy(update={"task": Labelled()})
    assert list(check_task(recipe)) == []


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ("[parallel]\ncontext = 2", "parallel.context", "share each row evenly"),
        ("[parallel]\ntensor = 2", "parallel.tensor", "share the positions of a row"),
        ("[parallel]\npipeline = 2", "parallel.pipeline", "activations of one shape"),
        ("[compile]\nenabled = true", "compile.enabled", "compiles for shapes"),
        (
            '[precision]\ncompute = "bf16"\n[precision.mx]\nenabled = true',
            "precision.mx.enabled",
            "blocks of 32 tokens",
        ),
        ('[task]\nname = "supervised"', "task.ragged", "names the fields of unequal lengths"),
    ],
)
def test_what_needs_rows_of_one_length_refuses_ragged_ones(tmp_path, text, key, part):
    found = problems(tmp_path, f'{text}\n[data]\npacking = "ragged"\n')
    assert [problem for problem in found if problem[0] == key and part in problem[1]], found


def test_fields_of_unequal_lengths_go_with_ragged_data(tmp_path):
    found = problems(tmp_path, '[task]\nname = "supervised"\nragged = ["points"]\n')
    assert [message for key, message in found if key == "task.ragged"] == [
        'names the fields of unequal lengths, and goes with data.packing = "ragged"'
    ]


def test_ragged_rows_suit_plans_that_divide_samples_and_experts(tmp_path):
    plan = "[parallel]\nreplicate = 2\nshard = 2\nexpert = 2"
    model = '[model]\nname = "mixtral"\n'
    recipe = load(tmp_path, f'[data]\npacking = "ragged"\n{model}{plan}')
    assert recipe.data.packing == "ragged"
