"""All implementations of an operation, as a model gets them."""

from functools import partial

from trainer.kernels.attention.local import attend
from trainer.kernels.registry import kernels, load


def load_implementations(operation):
    """Return the functions of an operation by name; on CPUs those by Triton compute as torch."""
    loaded = {name: load(kernels[operation][name].target) for name in kernels[operation]}
    if operation == "attention":
        return {name: partial(attend, function) for name, function in loaded.items()}
    return loaded
