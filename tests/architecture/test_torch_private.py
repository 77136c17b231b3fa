"""What PyTorch does not promise to keep is named in one module, for which releases are checked."""

import ast
import re
from subprocess import CalledProcessError

import pytest

from tests.architecture.sources import PACKAGES, modules, name, tree
from tests.torch_names import download, find_missing
from trainer.kernels import torch_private

HOME = "kernels/torch_private.py"
GUARDED = {
    "2.11.0": {"schedules:_warmup_p2p", "stage:_inference_mode"},
    "2.15.0": {"schedules:_warmup_p2p"},
}
"""names that a release does not have, and that are used only where it has them"""


NOT_TORCH = {"_asdict", "_exit", "_fingerprint", "_run_exitfuncs", "_value_"}
"""of Python's library and of `datasets`"""


def is_private(dotted: str) -> bool:
    """Return whether any part of a name starts with one underscore."""
    return bool(re.search(r"(^|\.)_(?!_)", dotted))


def dotted_name(node) -> str:
    """Return `a.b.c` of an attribute's syntax tree; empty for attributes of other expressions."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def private_names(path):
    """Yield the names of PyTorch in a module that are imported or looked up and not public."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found = [dotted_name(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [node.value] if re.fullmatch(r"torch(\.\w+)+", node.value) else []
        else:
            continue
        yield from (each for each in found if each.startswith("torch.") and is_private(each))


def own_names(path):
    """Yield the private names that a module of ours defines."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def private_members(path):
    """Yield the private attributes in a module of objects that are not its own."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in ("self", "cls"):
                yield node.attr


def test_private_names_of_torch_are_in_one_module():
    paths = [path for path in modules(*PACKAGES) if name(path) != HOME]
    found = {f"{name(path)}: {each}" for path in paths for each in private_names(path)}
    # A module of this name is loaded before processes fork, to have it there.
    assert found == {"engine/estimate/memory.py: torch._dynamo.utils"}


def test_private_members_of_torch_are_in_the_same_list():
    paths = [path for path in modules(*PACKAGES) if name(path) != HOME]
    ours = {each for path in paths for each in own_names(path)}
    listed = {each for names in torch_private.MEMBERS.values() for each in names}
    used = {each for path in paths for each in private_members(path)}
    assert used - ours - NOT_TORCH <= listed


@pytest.mark.matrix
def test_every_private_name_is_in_the_installed_torch():
    assert all(getattr(torch_private, home) is not None for home in torch_private.HOMES)


@pytest.mark.matrix
@pytest.mark.parametrize("version", torch_private.CHECKED)
def test_every_private_name_is_in_the_published_sources(version, tmp_path):
    try:
        wheel = download(version, tmp_path)
    except CalledProcessError as error:
        pytest.skip(f"the package index does not give it: {error.stderr[-200:]}")
    missing = {each.rpartition(".")[2] for each in find_missing(wheel)}
    assert missing == GUARDED.get(version, set())
