"""What is installed, and what each floor may import."""

import ast
import re
import sys

import pytest
import tomli
from setuptools import find_namespace_packages

from tests.architecture.sources import PACKAGES, ROOT, files, modules, name, tree


def packaged():
    """Return the folders that setup.py installs."""
    for node in ast.walk(tree(ROOT / "setup.py")):
        if isinstance(node, ast.Assign) and node.targets[0].id == "PARTS":
            parts = ast.literal_eval(node.value)
    return {found.replace(".", "/") for found in find_namespace_packages(ROOT, include=parts)}


def imported(path):
    """Yield the module of every absolute import, at any depth."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_is_installed():
    folders = {name(path.parent) for path in modules(*PACKAGES)}
    assert folders <= packaged()


def test_every_shipped_recipe_is_installed():
    data = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {
        name(path)
        for path in files()
        if name(path).startswith("recipes/") and path.suffix in (".toml", ".json", ".jsonl")
    }
    installed = {
        name(path)
        for pattern in data["trainer.recipes"]
        for path in (ROOT / "recipes").glob(pattern)
    }
    assert shipped == installed


def test_kernels_import_torch_and_triton_alone():
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    found = {
        f"{name(path)}: {module}"
        for path in modules("kernels")
        for module in imported(path)
        if module.partition(".")[0] not in allowed
    }
    assert found == set()


def test_models_know_nothing_of_ranks():
    found = {
        f"{name(path)}: {module}"
        for path in modules("model_zoo", "kernels")
        for module in imported(path)
        if module.startswith("torch.distributed")
        # The one operation that is an exchange between ranks.
        and not name(path).startswith("kernels/all_to_all/")
    }
    assert found == set()


@pytest.mark.parametrize("path", modules(*PACKAGES), ids=name)
def test_imports_inside_the_package_are_relative(path):
    assert [module for module in imported(path) if module.partition(".")[0] == "trainer"] == []


def one_name(package):
    """Return the one spelling of a package's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def test_every_requirement_has_a_pin():
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {
        one_name(line.partition(">=")[0]) for line in wanted if not line.startswith("trainer-nd[")
    }
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {one_name(line.partition("==")[0]) for line in lines}
    assert names <= pins
