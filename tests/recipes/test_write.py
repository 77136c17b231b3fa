"""What is written is read back as the same recipe."""

import random
from pathlib import Path

import pytest
import tomli

import trainer
from trainer.engine.recipe.load import load_recipe
from trainer.engine.recipe.write import format_toml, to_toml

RECIPES = Path(trainer.__file__).parent / "recipes"


# What a plugin registers would stay in this process.
SHIPPED = [path for path in sorted(RECIPES.glob("*.toml")) if "[plugins]" not in path.read_text()]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_resolved_recipe_reads_back_as_itself(path, tmp_path):
    recipe = load_recipe(path).recipe
    copy = tmp_path / "copy.toml"
    copy.write_text(to_toml(recipe))
    assert load_recipe(copy).recipe == recipe


def random_value(generator, depth=0):
    kind = generator.randrange(8 if depth < 4 else 5)
    if kind == 5:
        return [random_value(generator, depth + 1) for _ in range(generator.randrange(4))]
    if kind == 6:
        return [random_table(generator, depth + 1) for _ in range(generator.randrange(3))]
    if kind == 7:
        return random_table(generator, depth + 1)
    texts = ["", "é\n\t", 'a"b\\', "\x7f\x1b", "#[x]", "\U0001f600"]
    return generator.choice(
        [generator.choice(texts), generator.getrandbits(60), -1.5e-300, 1e22, True, 0.1]
    )


def random_table(generator, depth=0):
    keys = ["a", "b-c", "d_1", "e f", "", 'g"h', "\n", "é", "1.5"]
    picked = generator.sample(keys, generator.randrange(5))
    return {key: random_value(generator, depth) for key in picked}


@pytest.mark.parametrize("seed", range(300))
def test_any_tree_of_toml_values_survives(seed):
    tree = random_table(random.Random(seed))
    assert tomli.loads(format_toml(tree)) == tree


def test_values_that_are_none_are_left_out():
    assert format_toml({"a": None, "b": {"c": None}}) == "[b]\n"


def test_comments_stand_above_their_keys():
    text = format_toml({"a": {"b": 1}}, lambda path: f"about {path[-1]}\nmore")
    assert text == "# about a\n# more\n[a]\n# about b\n# more\nb = 1\n"
