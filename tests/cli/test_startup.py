"""Commands that need no torch do not load it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from trainer.engine.recipe.load import load_recipe
from trainer.engine.recipe.schema import REGISTRIES

ROOT = Path(trainer.__file__).absolute().parents[1]
DEBUG = str(Path(trainer.__file__).parent / "recipes/llama3_debug.toml")
SCRIPT = """
import sys
from trainer.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "numpy", "transformers", "rich"} & set(sys.modules)
    print(f"heavy: {sorted(heavy)}", file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",), ("--version",), ("validate", DEBUG), ("explain", DEBUG), ("list",),
        ("list", "model", "llama3"), ("schema",), ("new", "x.toml"), ("run", "--help"),
        ("generate", "--help"), ("run", "nosuch.toml"), ("validate", "nosuch.toml"),
        ("status", "."), ("report", "."), ("sweep", "nosuch.toml", "--grid", "optimizer.lr=1,2"),
        ("launch", "slurm", DEBUG, "--gpus-per-node", "4"),
        ("launch", "torchrun", DEBUG, "--gpus-per-node", "4"),
        ("sweep", DEBUG, "--grid", "optimizer.lr=1,2", "--dry-run"),
        ("docs",), ("docs", "optimizer.lr"), ("docs", "--write", "reference"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_command_starts_without_torch_and_numpy(arguments, tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, *arguments],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == "heavy: []", done.stderr


PRINT_POLICY = "    import os; print(os.environ['OMP_WAIT_POLICY'])"


@pytest.mark.parametrize(("given", "found"), [("", "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_sleep_while_they_wait_unless_told_otherwise(given, found):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT + PRINT_POLICY, "list"],
        capture_output=True, text=True, timeout=60,
        env=environment | ({"OMP_WAIT_POLICY": given} if given else {}),
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == found


BESIDE_THEIR_REGISTRY = {
    "trainer.engine.tasks.tables", "trainer.engine.observe.tables",
    "trainer.engine.sources.configs", "trainer.engine.tokenizers.configs",
}  # fmt: skip


def test_components_that_a_recipe_does_not_name_are_not_imported(tmp_path):
    show = "    print(*(each for each in sys.modules if each.startswith('trainer.')))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT + show, "validate", DEBUG],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    verdict, modules = done.stdout.splitlines()
    assert verdict.endswith("valid")
    recipe = load_recipe(DEBUG).recipe
    parts = (recipe.model, recipe.task, recipe.optimizer, recipe.schedule, *recipe.data.sources)
    named = {type(each).__module__ for each in parts} - BESIDE_THEIR_REGISTRY
    known = {registry[name].__module__ for registry in REGISTRIES.values() for name in registry}
    imported = known & set(modules.split())
    assert imported - BESIDE_THEIR_REGISTRY == named
    assert len(known - imported) > 5
