"""Train large models from one TOML file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.core.errors import TrainerError
    from .engine.inference.generate import generate
    from .engine.inference.measure import evaluate
    from .engine.inference.open import open_model
    from .engine.run.library import Result, assemble, convert, joined_ranks, load_recipe, train

__version__ = "0.1.0"
__all__ = [
    "Result",
    "TrainerError",
    "__version__",
    "assemble",
    "convert",
    "evaluate",
    "generate",
    "joined_ranks",
    "load_recipe",
    "open_model",
    "train",
]
_HOMES = {
    "TrainerError": "core.errors",
    "evaluate": "inference.measure",
    "generate": "inference.generate",
    "open_model": "inference.open",
}


def __getattr__(name: str) -> Any:
    # Lazy: `import trainer` loads nothing else, and nothing here loads torch before it is needed.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f".engine.{_HOMES.get(name, 'run.library')}", __name__)
    return getattr(home, name)
