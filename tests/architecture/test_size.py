"""Files, functions and the whole stay small."""

import ast

import pytest

from tests.architecture.measure import count_statements
from tests.architecture.sources import PACKAGES, modules, name, tree

LARGEST_FILE = 300
LARGEST_FUNCTION = 40
# Statements, so that documentation costs nothing. Raised only on purpose: in a commit of its own
# that says what the statements are for and what was simplified for them.
BUDGET = 44_400


def statements(function: ast.AST) -> int:
    """Count a function's statements at every depth, its docstring left out."""
    count = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
    return count - (ast.get_docstring(function) is not None)


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "benchmarks"])
def test_files_are_short(folder):
    lengths = {name(path): len(path.read_text().splitlines()) for path in modules(folder)}
    assert lengths
    assert {path: lines for path, lines in lengths.items() if lines > LARGEST_FILE} == {}


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "benchmarks"])
def test_functions_are_short(folder):
    counts = {
        f"{name(path)}:{node.lineno} {node.name}": statements(node)
        for path in modules(folder)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert counts
    assert {place: count for place, count in counts.items() if count > LARGEST_FUNCTION} == {}


def test_the_whole_stays_within_its_budget():
    found = count_statements()
    assert found <= BUDGET, f"{found:,} statements; see CONTRIBUTING.md, The rules in short"
