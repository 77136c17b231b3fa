"""Train large models from one TOML file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.run.library import Result, assemble, joined_ranks, load_recipe, train

__version__ = "0.1.0"
__all__ = ["Result", "__version__", "assemble", "joined_ranks", "load_recipe", "train"]


def __getattr__(name: str) -> Any:
    # Lazy: `import trainer` loads nothing else, and nothing here loads torch before it is needed.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .engine.run import library

    return getattr(library, name)
