"""Every command, recipe and module in the documents does what they say."""

import re
import subprocess
import sys
from contextlib import closing

import pytest

from tests.cases import quick
from tests.docs.blocks import blocks
from tests.docs.pages import FOLLOWED
from tests.docs.walk import ROOT, Reading, Walk
from trainer.cli.main import COMMANDS
from trainer.engine.core.errors import RecipeError
from trainer.engine.recipe.load import load_recipe
from trainer.engine.recipe.schema import REGISTRIES


@pytest.mark.slow
@pytest.mark.timeout(0)  # each command has a limit of its own, and a page has dozens
@pytest.mark.parametrize("document", quick(FOLLOWED, "docs/guide/run.md"))
def test_every_example_works(document, tmp_path):
    follow(document, Walk(tmp_path))


@pytest.mark.parametrize("document", FOLLOWED)
def test_every_option_and_recipe_is_there(document, tmp_path):
    follow(document, Reading(tmp_path))


def follow(document, walk):
    with closing(walk):
        for block in blocks(ROOT / document):
            try:
                walk.follow(block)
            except AssertionError as error:
                pytest.fail(f"{block.place}\n{error}", pytrace=False)


def test_the_tour_shows_every_command():
    commands = " ".join(
        command for block in blocks(ROOT / "docs/tour.md") for command, _ in block.commands()
    )
    assert [name for name in COMMANDS if f"trainer {name}" not in commands] == []


def test_what_is_not_there_yet_is_not_there():
    section = (ROOT / "README.md").read_text().split("## Not there yet")[1].split("\n## ")[0]
    named = re.findall(r"`trainer\s+([\w-]+)`", section)
    assert not {*named} & {*COMMANDS}
    settings = re.findall(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)+ = [^`]+)`", section)
    assert settings
    for setting in settings:
        key, _, value = setting.partition(" = ")
        with pytest.raises(RecipeError, match="not available in this version"):
            load_recipe(ROOT / "recipes/llama3_debug.toml", [f"{key}={value}"], world=2)


def test_what_is_measured_is_what_the_newest_results_say():
    done = subprocess.run(
        [sys.executable, "benchmarks/summary.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout, done.stderr
    assert done.stdout in (ROOT / "benchmarks/README.md").read_text(), (
        "put the output of `python benchmarks/summary.py` under Newest results"
    )
    table = done.stdout.partition("\n\n")[0]
    assert table in (ROOT / "README.md").read_text(), "put the table under Measured too"


def test_every_kind_of_component_has_an_example():
    page = (ROOT / "docs" / "guide" / "components.md").read_text("utf-8")
    rows = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")}
    assert REGISTRIES.keys() <= rows
