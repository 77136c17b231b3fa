"""Counts in this process, which believes in a GPU from then on.

python -m tests.cuda                   count all cases and write tests/cuda/counts.json
python -m tests.cuda count NAME ...    print the counts of these cases as JSON
python -m tests.cuda damage            print those of steps that were made worse
"""

import json
import sys
from pathlib import Path

from tests.cuda.guard import load_guard

load_guard()  # before torch

from tests.cuda.cases import CASES  # noqa: E402 - the guard comes first
from tests.cuda.device import add_device  # noqa: E402 - the guard comes first

add_device()  # before modules look for a GPU

import trainer  # noqa: E402 - the device comes first
from tests.cuda.count import count_graphs, count_step  # noqa: E402 - the device comes first
from tests.cuda.damage import DAMAGE  # noqa: E402 - the device comes first
from trainer.engine.recipe.load import load_recipe  # noqa: E402 - the device comes first

COUNTS = Path(__file__).with_name("counts.json")
RECIPES = Path(trainer.__file__).parent / "recipes"
VOCABULARY = 1000
"""entries of tokenizers that are not read"""


def count(case):
    """Count a case: the graphs if it compiles, else the operators of a step."""
    add_device(case.capability)
    recipe = load_recipe(RECIPES / f"{case.recipe}.toml", list(case.settings), case.ranks).recipe
    counter = count_graphs if recipe.compile.enabled else count_step
    return counter(recipe, case.ranks, VOCABULARY)


def main(words):
    """Do what the command line says."""
    if words == ["damage"]:
        recipe = load_recipe(RECIPES / "llama3_debug.toml", [], 1).recipe
        print(json.dumps({name: damage(recipe) for name, damage in DAMAGE.items()}))
        return
    names = words[1:] if words[:1] == ["count"] else list(CASES)
    found = {}
    for name in names:
        print(name, file=sys.stderr, flush=True)
        found[name] = count(CASES[name])
    text = json.dumps(found, indent=2)
    if words:
        print(text)
    else:
        COUNTS.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
