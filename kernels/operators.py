"""How a function becomes an operation of torch, computed by Triton on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from .registry import INTERPRETED, load

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TorchOperator(Protocol[P, R]):
    """An operation of torch (`torch.library.CustomOpDef`) with the types of its function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute the operation."""

    def register_fake(self, function: Callable[P, Any], /) -> Callable[P, Any]:
        """Say which shapes and dtypes come out, for tracing without data."""

    def register_autograd(
        self, backward: Callable[..., Any], /, *, setup_context: Callable[..., None]
    ) -> None:
        """Say how the operation is differentiated."""


def operator(
    name: str,
    *,
    cuda: str = "",
    mutates_args: tuple[str, ...] = (),
    fake: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, R]], TorchOperator[P, R]]:
    """Make a function the operation `trainer::NAME`, which torch.compile keeps as one call.

    Args:
        name: NAME.
        cuda: "module:function" below this package that computes the operation on GPUs, with the
            same arguments. It is imported at the first call: Triton is installed only where there
            is a GPU. Empty: the decorated function serves all devices, else CPUs alone.
        mutates_args: names of the arguments that are written to.
        fake: maps the same arguments to empty tensors of the right shapes and dtypes, for tracing
            without data; left out where `register_fake` gives it.
    """

    def define(function: Callable[P, R]) -> TorchOperator[P, R]:
        # torch reads the schema from the function's types, which know no classes of ours.
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        target = f"{__package__}.{cuda}"

        # torch leaves arguments out that have their defaults.
        defaults = [each.default for each in signature(function).parameters.values()]

        def launch(*args: Any) -> Any:
            return load(target)(*args, *defaults[len(args) :])

        operation = torch.library.custom_op(
            f"trainer::{name}",
            launch if cuda and INTERPRETED else function,
            mutates_args=mutates_args,
            device_types="cpu" if cuda else None,
            schema=schema,
        )
        if cuda:
            operation.register_kernel("cuda", launch)
        if fake is not None:
            operation.register_fake(fake)
        return cast("TorchOperator[P, R]", operation)

    return define


def save_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: object) -> None:
    """Keep all inputs, which are tensors, for the backward pass."""
    ctx.save_for_backward(*inputs)


def require_float(*tensors: Tensor) -> None:
    """Refuse what a kernel that sums in fp32 would silently round.

    Raises:
        TypeError: a tensor is neither fp32, fp16 nor bf16.
    """
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise TypeError(f"the kernel computes in fp32 and takes no {tensor.dtype}")
