"""Train large models from one TOML file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.core.errors import TrainerError
    from .engine.inference.evaluate import evaluate
    from .engine.inference.generate import generate
    from .engine.inference.infer import infer
    from .engine.inference.open import open_model
    from .engine.report.frame import load_metrics
    from .engine.run.library import Result, assemble, convert, joined_ranks, load_recipe, train
    from .engine.run.own_loop import open_saver
    from .engine.train.evaluate import validate

__version__ = "0.1.0"
__all__ = [
    "Result",
    "TrainerError",
    "__version__",
    "assemble",
    "convert",
    "evaluate",
    "generate",
    "infer",
    "joined_ranks",
    "load_metrics",
    "load_recipe",
    "open_model",
    "open_saver",
    "train",
    "validate",
]
_HOMES = {
    "TrainerError": "core.errors",
    "evaluate": "inference.evaluate",
    "generate": "inference.generate",
    "infer": "inference.infer",
    "load_metrics": "report.frame",
    "open_model": "inference.open",
    "open_saver": "run.own_loop",
    "validate": "train.evaluate",
}


def __getattr__(name: str) -> Any:
    # Lazy: `import trainer` loads nothing else, and nothing here loads torch before it is needed.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f".engine.{_HOMES.get(name, 'run.library')}", __name__)
    return getattr(home, name)
