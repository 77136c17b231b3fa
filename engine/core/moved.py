"""Modules that plugins imported before `trainer.plugins` existed. Torch-free.

To be deleted after 0.1: until then an old name works, with a warning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

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


class MovedModules(MetaPathFinder, Loader):
    """Lets an old module's name stand for `trainer.plugins`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the names in `MOVED`."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the old module with the names of `trainer.plugins`."""
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
