"""The reference under docs/ is what the recipes, the registries and the commands say."""

import re

import pytest
import tomli

from tests.docs.support import PAGE, make_page
from tests.docs.walk import ROOT
from trainer.cli.docs import commands, commands_page
from trainer.cli.main import COMMANDS, import_command
from trainer.engine.core.errors import ExitCode
from trainer.engine.recipe.documents.pages import plain, recipe_pages
from trainer.engine.recipe.schema import REGISTRIES, Recipe
from trainer.engine.recipe.structure import describe_fields

FOLDER = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def made():
    return {**recipe_pages(), "commands.md": commands_page()}


def test_the_pages_are_what_is_made_now(made):
    kept = {path.name: path.read_text("utf-8") for path in FOLDER.iterdir()}
    changed = [name for name in {*made, *kept} if made.get(name) != kept.get(name)]
    assert changed == [], "run `make docs`"


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_component_has_a_row_for_every_key_with_its_description(made, kind):
    page = made[f"{kind}.md"]
    for name in REGISTRIES[kind]:
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        for key, description in describe_fields(REGISTRIES[kind][name]).items():
            if key == "name":
                continue
            row = re.search(rf"^\| `{key}` \| (.*) \|$", section, re.MULTILINE)
            assert row, f"{kind} {name}: no row for {key}"
            described = " ".join(plain(description).split()).replace("|", r"\|")
            assert row[1].endswith(f"| {described}"), f"{kind} {name} {key}"
            assert described


def test_every_table_of_a_recipe_has_a_heading(made):
    for table in Recipe.model_fields:
        assert re.search(rf"^## \[+{table}[].]", made["recipe.md"], re.MULTILINE), table


def test_every_component_is_reached_from_the_page_of_the_recipe(made):
    for kind, registry in REGISTRIES.items():
        for name in registry:
            anchor = name.lower().replace(".", "")
            assert f"({kind}.md#{anchor})" in made["recipe.md"]


def test_every_command_and_sub_command_has_a_heading_and_its_options(made):
    page = made["commands.md"]
    for name in COMMANDS:
        assert f"\n## trainer {name}\n" in page
        for word in getattr(import_command(name), "commands", {}):
            assert f"\n### trainer {name} {word}\n" in page
    run = page.split("\n## trainer run\n")[1].split("\n## ")[0]
    for option in ("--set KEY=VALUE", "--nproc", "--dry-run", "--allow-changed KEYS", "--replay"):
        assert f"| `{option}" in run


def test_every_command_that_prints_a_table_has_json():
    without = {
        command.name
        for command in commands()
        if "--json" not in (option.split()[0] for option, _ in command.options)
    }
    groups = {name for name in COMMANDS if hasattr(import_command(name), "commands")}
    # Predictions are JSON in any case.
    own = {
        "new",
        "schema",
        "infer",
        "precompute",
        "launch slurm",
        "launch torchrun",
        "launch kubernetes",
        "federate run",
        "federate stop",
        "federate rounds",  # a group within a group
        *(f"federate rounds {word}" for word in ("export", "edit", "branch", "prune")),
    }
    assert without - groups == own


def test_every_option_of_every_command_says_what_it_is():
    bare = [
        f"{command.name} {option}"
        for command in commands()
        for option, text in command.options
        if not re.sub(r"\[.*\]", "", text).strip()
    ]
    assert bare == []


def test_every_exit_code_has_a_meaning(made):
    for code in ExitCode:
        assert f"| {code.value} | {code.meaning} |" in made["exit-codes.md"]
        assert code.meaning


def test_the_shipped_recipes_are_shown_whole(made):
    shown = {
        heading: tomli.loads(text)
        for heading, text in re.findall(
            r"^## (\S+)\n\n```toml\n(.*?)\n```$", made["recipes.md"], re.MULTILINE | re.DOTALL
        )
    }
    shipped = {
        path.relative_to(ROOT / "recipes").with_suffix("").as_posix(): tomli.loads(path.read_text())
        for path in [*(ROOT / "recipes").glob("*.toml"), *(ROOT / "recipes").glob("base/*.toml")]
    }
    assert shown == shipped


def test_no_page_names_a_place_on_this_machine(made):
    for name, text in made.items():
        assert str(ROOT) not in text, name
        assert "/home/" not in text, name


def test_the_page_of_what_goes_with_what_is_what_recipes_are_checked_by():
    assert PAGE.read_text() == make_page(), "run python -m tests.docs.support"
