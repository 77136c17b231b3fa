"""Check the private names of PyTorch that the trainer uses against the sources of its releases.

    python -m tests.torch_names 2.11.0 2.15.0

A release is downloaded, not installed: its wheel for macOS, the smallest one, with the same Python
sources as the others.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from trainer.kernels.torch_private import HOMES, MEMBERS

PLATFORMS = ("macosx_14_0_arm64", "macosx_11_0_arm64")
OPERATIONS = "torchgen/packaged/ATen/native/native_functions.yaml"


def main() -> None:
    missing = {}
    for version in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            missing[version] = find_missing(download(version, Path(folder)))
        print(f"torch {version}: {', '.join(missing[version]) or 'has every name'}")
    sys.exit(any(missing.values()))


def download(version: str, folder: Path) -> Path:
    """Return the wheel of a release, downloaded into a folder.

    Raises:
        CalledProcessError: the package index has no such release, or cannot be reached.
    """
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(folder)]
    command += ["--only-binary", ":all:", "--python-version", "3.12", f"torch=={version}"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return next(folder.glob("torch-*.whl"))


def find_missing(wheel: Path) -> list[str]:
    """Return the names that the sources in a wheel do not have."""
    with ZipFile(wheel) as archive:
        sources = Sources(archive)
        homes = [home for home in HOMES.values() if not sources.has(home)]
        members = [
            f"{module}:{name}"
            for module, names in MEMBERS.items()
            for name in names
            if not re.search(rf"\b{name}\b", sources.read(module))
        ]
    return homes + members


class Sources:
    """The Python sources in a wheel of PyTorch, and its list of operations."""

    def __init__(self, archive: ZipFile) -> None:
        self._archive = archive
        self._files = set(archive.namelist())
        self._operations = set(
            re.findall(r"^- func: (\w+)", archive.read(OPERATIONS).decode(), re.MULTILINE)
        )

    def has(self, home: str) -> bool:
        """Return whether there is a module, or what it is said to define."""
        module, _, path = home.partition(":")
        if path.startswith(("ops.aten.", "_foreach_")):
            return path.removeprefix("ops.aten.") in self._operations
        if path.startswith("ops."):  # made in C++: PyTorch's own Python code calls it
            calls = self.read("torch.distributed._functional_collectives")
            return path.removeprefix("ops.") in calls
        text = self.read(module)
        return bool(text) and (not path or path in set(defined_names(ast.parse(text))))

    def read(self, module: str) -> str:
        """Return the text of a module, empty where there is none."""
        path = module.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi", f"{path}/__init__.pyi"):
            if file in self._files:
                return self._archive.read(file).decode()
        return ""


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a module's code defines or imports, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)


if __name__ == "__main__":
    main()
