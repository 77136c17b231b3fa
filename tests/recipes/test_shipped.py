"""The recipes that are shipped, and the schema beside them."""

import json
from pathlib import Path

import jsonschema
import pytest
import tomli

import trainer
from trainer.engine.recipe.documents.describe import schema_text
from trainer.engine.recipe.documents.starter import shipped_recipes, starter
from trainer.engine.recipe.layers import read_layers
from trainer.engine.recipe.load import leave_behind, load_recipe

RECIPES = Path(trainer.__file__).parent.resolve() / "recipes"
SHIPPED = sorted(RECIPES.glob("*.toml"))


@pytest.fixture(scope="module")
def schema():
    return json.loads((RECIPES / "schema.json").read_text())


def is_valid(schema, text):
    if "[plugins]" in text:  # the schema knows no component of a plugin
        return True
    return jsonschema.Draft202012Validator(schema).is_valid(tomli.loads(text))


@pytest.mark.parametrize("path", [*SHIPPED, *RECIPES.glob("base/*.toml")], ids=lambda p: p.stem)
def test_a_recipe_starts_with_a_comment_and_its_schema(path, schema):
    first, second, *_ = path.read_text().splitlines()
    assert first.startswith("# ")
    assert (path.parent / second.removeprefix("#:schema ")).resolve() == RECIPES / "schema.json"
    assert is_valid(schema, path.read_text())


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("quickstart", 1),
        ("chat_debug", 1),
        ("llama3_debug", 1),
        ("llama3_debug", 4),
        ("federated_debug", 1),
        ("diloco", 2),
        ("sparse_diloco", 1),
        ("federated_experts", 1),
        ("deepseek_v3_debug", 2),
        ("gpt_oss_debug", 2),
        ("llama4_debug", 2),
        ("lora_debug", 2),
        ("moe_debug", 2),
        ("moe_1b", 1),
        ("moe_1b", 8),
        ("moe_1b", 64),
        ("llama3_1b", 16),
        ("llama3_8b", 8),
        ("llama3_8b", 128),
        ("llama3_70b", 64),
        ("llama3_405b", 1024),
        ("qwen3_30b_a3b", 64),
        ("gpt_oss_20b", 64),
        ("deepseek_v3_671b", 1024),
    ],
)
def test_a_recipe_is_valid_on_the_machines_that_it_is_for(name, world):
    load_recipe(RECIPES / f"{name}.toml", world=world)


def test_the_schema_is_current():
    assert (RECIPES / "schema.json").read_text() == schema_text(), (
        "run: trainer schema > recipes/schema.json"
    )


def test_the_schema_itself_is_valid(schema):
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    "text",
    [
        "[run]\nstpes = 3", "[run]\nsteps = '3'", "[optimizer]\nname = 'sgd'\nbetas = [1.0, 1.0]",
        "[optimizer]\nmomentum = 0.1", "[model]\nflavor = '9b'", "[nope]", "extends = [3]",
        "[[data.sources]]\nname = 'text'", "[optimizer]\nbetas = [0.9]",
    ],
)  # fmt: skip
def test_editors_see_what_we_would_refuse(schema, text):
    assert not is_valid(schema, text)


def test_every_key_in_the_schema_is_described(schema):
    described = schema["$defs"] | {
        f"{kind} {option['properties']['name']['const']}": option
        for kind in ("model", "tokenizer", "optimizer", "schedule", "loss")
        for option in schema["properties"][kind]["oneOf"]
    }
    assert len(described) > 20
    bare = [
        f"{name}.{key}"
        for name, table in described.items()
        for key, field in table["properties"].items()
        if "description" not in field and "$ref" not in field and key != "name"
    ]
    assert bare == []


@pytest.mark.parametrize("name", [path.stem for path in SHIPPED])
def test_a_starter_says_the_same_as_the_recipe_it_comes_from(name, tmp_path, schema):
    path = tmp_path / f"{name}.toml"
    path.write_text(starter(name))
    tree = read_layers(RECIPES / f"{name}.toml")
    leave_behind(tree)
    expected = tree.values
    expected["run"].pop("name", None)
    assert tomli.loads(path.read_text()) == expected
    assert is_valid(schema, path.read_text())
    if "[plugins]" not in path.read_text():  # what a plugin registers stays in this process
        load_recipe(path)
    keys = [line for line in path.read_text().splitlines() if " = " in line and line[0] != "#"]
    comments = [line for line in path.read_text().splitlines() if line.startswith("# ")]
    assert len(comments) > 0.7 * len(keys)


def test_each_shipped_recipe_says_what_it_is_for():
    assert all(shipped_recipes().values())
