"""Figures of the architecture: `python -m tests.architecture.measure`."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.architecture.sources import PACKAGES, ROOT, modules, name, tree


@dataclass(frozen=True)
class Import:
    """One imported module of ours, or torch.

    Attributes:
        module: path from the root without suffix, or "torch".
        names: what is imported of it.
        function: the innermost function that imports it; empty at the top level.
    """

    module: str
    names: tuple[str, ...]
    function: str


def imports(path: Path) -> Iterator[Import]:
    """Yield the imports of our own modules and of torch at any depth, those for types included."""
    yield from _imports(path, tree(path), "")


def _imports(path: Path, node: ast.AST, function: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(path, child, child.name)
            continue
        if isinstance(child, ast.ImportFrom) and child.level:
            folder = path.parents[child.level - 1]
            home = folder.joinpath(*(child.module or "").split("."))
            whole = []
            for alias in child.names:
                if (home / f"{alias.name}.py").exists():
                    module = (home / alias.name).relative_to(ROOT).as_posix()
                    yield Import(module, (), function)
                else:
                    whole.append(alias.name)
            if whole:
                yield Import(home.relative_to(ROOT).as_posix(), tuple(whole), function)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            first = child.names[0].name if isinstance(child, ast.Import) else child.module or ""
            if first.partition(".")[0] == "torch":
                yield Import("torch", (), function)
        yield from _imports(path, child, function)


# The methods of a config that make the real thing.
BUILD = (
    "build",
    "build_data",
    "build_encoding",
    "build_collation",
    "build_prediction",
    "build_criterion",
)


def package_of(module: str) -> str:
    """Return `engine/NAME` for what is in one of the engine's packages, else the top folder."""
    parts = module.split("/")
    return "/".join(parts[:2]) if parts[0] == "engine" else parts[0]


def mutual_packages() -> set[tuple[str, str]]:
    """Return the pairs of the engine's packages that import each other."""
    edges = {
        (package_of(name(path).removesuffix(".py")), package_of(each.module))
        for path in modules("engine")
        for each in imports(path)
        if name(path) != "engine/recipe/schema.py"  # puts the tables of all packages together
    }
    return {pair for pair in edges if pair[0] < pair[1] and pair[::-1] in edges}


def circles() -> list[list[str]]:
    """Return the groups of modules that import each other, at any depth and for types too.

    What `build` imports is left out: a config and what it builds may know each other.
    """
    graph = {
        name(path).removesuffix(".py"): {
            each.module for each in imports(path) if each.function not in BUILD
        }
        for path in modules("engine", "kernels", "model_zoo")
    }
    reached = {module: _reach(graph, module) for module in graph}
    groups = {
        tuple(sorted({module} | {each for each in reached[module] if module in reached[each]}))
        for module in graph
        if module in reached[module]
    }
    return sorted(map(list, groups))


def _reach(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the modules that one imports, and those that they import."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = {each for each in graph[waiting.pop()] if each in graph} - reached
        reached |= new
        waiting += new
    return reached


def deferred_imports() -> list[str]:
    """Return the imports inside functions, outside the CLI and `build`."""
    return [
        f"{name(path)}: {each.function} imports {each.module}"
        for path in modules("engine", "kernels", "model_zoo")
        for each in imports(path)
        if each.function not in ("", *BUILD)
    ]


def readers_of_recipes() -> set[str]:
    """Return the modules outside recipe/ and the CLI that import `Recipe`."""
    return {
        name(path)
        for path in modules("engine")
        for each in imports(path)
        if "Recipe" in each.names and package_of(name(path)) != "engine/recipe"
    }


def count_statements() -> int:
    """Return the number of statements of the sources, docstrings left out."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for path in modules(*PACKAGES)
        for node in ast.walk(tree(path))
    )


def files_by_folder() -> dict[str, int]:
    """Return the number of modules of each folder, `__init__.py` left out."""
    found: dict[str, int] = defaultdict(int)
    for path in modules(*PACKAGES):
        found[name(path.parent)] += path.name != "__init__.py"
    return found


def comments_by_hundred() -> float:
    """Return the comments in a hundred lines, those for tools left out."""
    comments = lines = 0
    for path in modules(*PACKAGES):
        lines += len(path.read_text("utf-8").splitlines())
        with path.open("rb") as file:
            comments += sum(
                token.type == tokenize.COMMENT and not re.search("noqa|type: ignore", token.string)
                for token in tokenize.tokenize(file.readline)
            )
    return 100 * comments / lines


def main() -> None:
    """Print the figures."""
    paths = [path for path in modules(*PACKAGES) if path.name != "__init__.py"]
    sizes = [len(path.read_text("utf-8").splitlines()) for path in paths]
    crowded = {folder: count for folder, count in files_by_folder().items() if count > 16}
    crowded.pop("cli", None)
    print(f"{len(sizes)} files, {sum(sizes):,} lines, {count_statements():,} statements")
    print(f"longest file {max(sizes)} lines, median {median(sizes):.0f}")
    print(f"{comments_by_hundred():.1f} comments in 100 lines")
    print(f"packages that import each other: {sorted(mutual_packages()) or 'none'}")
    print("modules that import each other:", *(circles() or ["none"]), sep="\n  ")
    print(f"folders of more than 16 files: {crowded or 'none'}")
    print(f"imports inside functions: {len(deferred_imports())}")
    readers = sorted(readers_of_recipes())
    print(f"modules that see a whole recipe: {len(readers)}", *readers, sep="\n  ")


if __name__ == "__main__":
    main()
