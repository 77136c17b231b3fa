"""Modules of plugins: imported as a recipe says, and the names that they imported before 0.1.

Old names are to be deleted after 0.1: until then they work, with a warning. Torch-free.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader  # costs a start ten milliseconds
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import cast

from .errors import Problem, RecipeError

MOVED = {
    "trainer.engine.config",
    "trainer.engine.data.configs",
    "trainer.engine.data.documents",
    "trainer.engine.errors",
    "trainer.engine.loss.configs",
    "trainer.engine.models",
    "trainer.engine.observe.configs",
    "trainer.engine.registry",
}
GONE = "trainer.engine.loss"
"""the package of a moved module that has no package now"""


def import_plugins(modules: Mapping[str, Path | None]) -> list[tuple[str, str]]:
    """Import the modules that register components; return those that cannot be, and why.

    Args:
        modules: for each module's name, the folder in which it is looked for if Python does not
            find it; None: in none.
    """
    broken = []
    for module, folder in modules.items():
        try:
            if folder is not None:
                _look_beside(module, folder)
            import_module(module)
        # A plugin runs any code, `sys.exit` included: it must not hide what else is wrong.
        except (Exception, SystemExit) as error:
            broken.append((module, f"cannot import {module!r}: {type(error).__name__}: {error}"))
    return broken


def _look_beside(module: str, folder: Path) -> None:
    """Let Python find a module in a folder, and what the module imports from there.

    The folder comes last, so that nothing in it hides an installed module.
    """
    top = module.partition(".")[0]
    if top in sys.modules or find_spec(top) is not None:
        return
    if PathFinder.find_spec(top, [str(folder)]) is not None:
        sys.path.append(str(folder))


def require_plugins(modules: Sequence[str]) -> None:
    """Import the modules that `--plugin` names, from the working directory too.

    Raises:
        RecipeError: those that cannot be imported, and why.
    """
    broken = import_plugins(dict.fromkeys(modules, Path.cwd()))
    if broken:
        raise RecipeError([Problem(message, "--plugin") for _, message in broken])


class MovedModules:
    """Lets an old module's name stand for `trainer.plugins`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the names in `MOVED`."""
        if fullname not in {*MOVED, GONE}:
            return None
        return ModuleSpec(fullname, cast("Loader", self), is_package=fullname == GONE)

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill the old module with the names of `trainer.plugins`."""
        if module.__name__ == GONE:
            return
        warnings.warn(
            f"{module.__name__} has moved: import from trainer.plugins; this name works until 0.2",
            FutureWarning,
            stacklevel=2,
        )
        module.__dict__.update(vars(import_module("trainer.plugins")))


def support_old_names() -> None:
    """Let imports of `MOVED` succeed; asked only after all other finders."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
