"""Optimizers without torch's compiler.

`torch.optim` imports it to switch it off around its own methods, and so doubles the time that an
eager run takes to its first step. Nothing here compiles an optimizer, so there is nothing to
switch off.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.optim import Optimizer


def spare_compiler() -> None:
    """Let optimizers be built without importing the compiler; call it before the first one is."""
    for method in (Optimizer.add_param_group, Optimizer.zero_grad):
        # What torch._disable_dynamo asks for before it imports: the function to call instead.
        original = inspect.unwrap(method)
        if original is not method:
            original.__dict__.setdefault("__dynamo_disable", original)


def plain_step(optimizer: Optimizer) -> Callable[[], None]:
    """Return the optimizer's step free of its decorators (compiler, profiler, hooks)."""
    step = inspect.unwrap(type(optimizer).step)

    def without_gradients() -> None:
        with torch.no_grad():
            step(optimizer)

    return without_gradients
