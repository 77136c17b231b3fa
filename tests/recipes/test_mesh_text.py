"""`parallel.mesh` gives all degrees in one text."""

import re

import pytest
from pydantic import ValidationError

from trainer.engine.parallel.mesh import AXES, EXPERT_AXES
from trainer.engine.parallel.tables import Parallel
from trainer.engine.recipe.changes import compare
from trainer.engine.recipe.load import load_recipe
from trainer.engine.recipe.write import explain, to_toml

RUN = "[run]\nsteps = 1\n"
DEFAULT = dict.fromkeys((*AXES, *EXPERT_AXES), 1)

TEXTS = {
    "dp:2,fsdp:-1,tp:4": {"replicate": 2, "shard": -1, "tensor": 4},
    "ddp:2, cp:2": {"replicate": 2, "context": 2},
    "pp : 1 ,TP:2": {"tensor": 2},
    "replicate:2,shard:2,context:2,tensor:2,pipeline:1": {
        "replicate": 2, "shard": 2, "context": 2, "tensor": 2,
    },
    "tp:4": {"tensor": 4},
    "ep:1,etp:1,shard:4": {"shard": 4},
}  # fmt: skip


def degrees(recipe):
    return {axis: getattr(recipe.parallel, axis) for axis in DEFAULT}


@pytest.mark.parametrize("text", list(TEXTS))
def test_it_gives_the_degrees_and_one_to_axes_that_it_does_not_name(text, load):
    expected = DEFAULT | TEXTS[text]
    assert degrees(load(f'{RUN}[parallel]\nmesh = "{text}"').recipe) == expected
    assert Parallel(mesh=text).model_dump() == Parallel(**expected).model_dump()


def test_every_degree_says_where_the_text_stands(load):
    loaded = load(f'{RUN}[parallel]\nmesh = "fsdp:-1,tp:4"')
    origins = {each.key: (each.value, each.origin) for each in explain(loaded)}
    assert origins["parallel.tensor"] == (4, "recipe.toml:4")
    assert origins["parallel.shard"] == (-1, "recipe.toml:4")
    assert origins["parallel.replicate"] == (1, "recipe.toml:4")


def test_the_saved_recipe_gives_the_same_run(load, write):
    recipe = load(f'{RUN}[parallel]\nmesh = "dp:2,tp:4"').recipe
    again = load_recipe(write("saved.toml", to_toml(recipe))).recipe
    assert again == recipe
    assert compare(recipe.model_dump(), load(RUN).recipe.model_dump()) == []


def test_later_layers_win(load, write):
    write("base.toml", "[parallel]\nreplicate = 4\ntensor = 8\nfsdp = { offload = true }\n")
    text = f'extends = ["base.toml"]\n{RUN}[parallel]\nmesh = "etp:1,fsdp:-1"'
    loaded = load(text, "parallel.context=2")
    assert degrees(loaded.recipe) == DEFAULT | {"shard": -1, "context": 2}
    assert loaded.recipe.parallel.fsdp.offload
    assert degrees(load(text, "parallel.mesh=tp:2,dp:2").recipe) == DEFAULT | {
        "tensor": 2,
        "replicate": 2,
    }


FAULTS = {
    "tpp:2": ('no axis of the mesh is called "tpp"', 'did you mean "tp"?'),
    "tp:2,tensor:2": ('"tensor:2" gives tensor a second time', ""),
    "tp:two": (
        'expected a degree of tensor, such as tp:2, got "two"', "-1 takes what is left over",
    ),
    "tp:2.0": (
        'expected a degree of tensor, such as tp:2, got "2.0"', "-1 takes what is left over",
    ),
    "tp:-2": (
        'expected a degree of tensor, such as tp:2, got "-2"', "-1 takes what is left over",
    ),
    "tp:1048577": (
        'expected a degree of tensor, such as tp:2, got "1048577"', "-1 takes what is left over",
    ),
    "tp": ('expected a degree of tensor, such as tp:2, got ""', "-1 takes what is left over"),
    "tp:2,": (
        'expected WORD:DEGREE and commas, got "tp:2,"', 'such as "dp:2,fsdp:-1,tp:4"',
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", list(FAULTS))
def test_a_fault_is_located(text, problems):
    (problem,) = problems(f'{RUN}[parallel]\nmesh = "{text}"')
    assert (problem.file, problem.line, problem.key) == ("recipe.toml", 4, "parallel.mesh")
    assert (problem.message, problem.hint) == FAULTS[text]
    with pytest.raises(ValidationError, match=re.escape(problem.message)):
        Parallel(mesh=text)


def test_a_degree_beside_it_is_refused(problems):
    (problem,) = problems(f'{RUN}[parallel]\nmesh = "tp:2"\ntensor = 4')
    assert (problem.line, problem.key) == (4, "parallel.mesh")
    assert problem.message == "parallel.tensor is given beside it"
    with pytest.raises(ValidationError, match="tensor is given beside mesh"):
        Parallel(mesh="tp:2", tensor=4)


def test_what_does_not_fit_points_at_the_text(problems):
    (problem,) = problems(f'{RUN}[parallel]\nmesh = "fsdp:-1,tp:-1"')
    assert (problem.line, problem.message) == (4, "tensor and shard are both -1")
    (problem,) = problems(f'{RUN}[parallel]\nmesh = "dp:0"')
    assert problem.line == 4
    (problem,) = problems(f'{RUN}[parallel]\nmesh = "tp:4"', world=8)
    assert problem.message == "the product of the degrees (4) is not the world size (8)"
    (problem,) = problems(f"{RUN}[parallel]\nmesh = 4")
    assert problem.key == "parallel.mesh"
