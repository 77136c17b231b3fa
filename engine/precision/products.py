"""Replaces a model's matmuls by ones in low precision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

from torch import Tensor

from ...kernels.grouped_gemm_fp8.op import StepWeights
from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ...model_zoo.layers.dense import Linear
from ...model_zoo.layers.experts import Experts
from ..core.errors import EnvironmentFault
from ..core.extras import install_command
from .choose import select_weights
from .tables import MX, Float8, LowPrecision

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Takes [..., in], [out, in] and a bias or None, returns [..., out], as `F.linear` does."""


def enable_low_precision(
    model: Model,
    config: ModelConfig,
    tables: dict[str, LowPrecision],
    *,
    keeps_experts: bool = False,
) -> list[str]:
    """Let the weights that tables name multiply in low precision, in place.

    Parameters keep their dtype. Each rank computes scales from what it multiplies: its own rows of
    activations, and its part of a weight.

    Args:
        model: the model before it is split over ranks, with its adapters.
        config: the model's config.
        tables: the enabled tables of `[precision]` by their key.
        keeps_experts: whether experts' weights in float8 are kept for all passes of a step; see
            `StepWeights`.

    Returns:
        a line for each format that says which weights multiply in it.

    Raises:
        EnvironmentFault: torchao is not installed.
    """
    notes = []
    for word, table in tables.items():
        names = select_weights(table, config)
        experts = [name for name in names if config.layout.is_expert(name)]
        projections = [name for name in names if name not in set(experts)]
        if projections:
            product = make_product(table)
        for name in projections:
            projection = cast("Linear", model.get_submodule(name.rpartition(".")[0]))
            # The function is replaced, not the module: tensor parallelism takes only layers that
            # are `LocalParameters`, and torchao's are not.
            projection.product = product
        for name in experts:
            layer = cast("Experts", model.get_submodule(name.rpartition(".")[0]))
            layer.product = StepWeights(is_kept=keeps_experts)
        if names:
            notes.append(_describe(word, table, len(projections), len(experts)))
    return notes


def _describe(word: str, table: LowPrecision, projections: int, experts: int) -> str:
    how = f"{cast('Float8 | MX', table).recipe}{', emulated' if table.emulate else ''}"
    parts = [f"{projections} projections ({how})"] if projections else []
    parts += [f"{experts} weights of experts (blocks of 128)"] if experts else []
    return f"{word}: {' and '.join(parts)} multiply in it"


def make_product(table: LowPrecision) -> Product:
    """Return the function that multiplies activations with a projection's weight.

    Raises:
        EnvironmentFault: torchao is not installed.
    """
    word = "float8" if isinstance(table, Float8) else "mx"
    try:
        with _quiet():
            return _float8(table) if isinstance(table, Float8) else _mx(cast("MX", table))
    except ImportError as error:
        raise EnvironmentFault(
            f"precision.{word} needs the package torchao, 0.18: {error}",
            install_command("float8"),
        ) from error


def _float8(table: Float8) -> Product:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = Float8LinearConfig.from_recipe_name(table.recipe)
    kinds = (config.gemm_config_output, config.gemm_config_grad_input)
    # float8 outputs and padding are off: `mismatches` has refused widths that would need padding.
    each = [
        ScaledMMConfig(table.emulate, kind.use_fast_accum, False, False)
        for kind in (*kinds, config.gemm_config_grad_weight)
    ]
    settings = LinearMMConfig(*each)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The matmul takes no bias, so that it is added in the dtype of the output.
        y: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), settings, config)
        return y if bias is None else y + bias

    return product


def _mx(table: MX) -> Product:
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    multiply = partial(
        _to_mxfp8_then_scaled_mm,
        kernel_preference=KernelPreference.EMULATED if table.emulate else KernelPreference.AUTO,
        scale_calculation_mode=ScaleCalculationMode.RCEIL,
        wgrad_with_hp=table.recipe == "mxfp8_rceil_wgrad_with_hp",
    )

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = multiply(x, weight)
        return y if bias is None else y + bias

    return product


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torchao from warning of kernels for other GPUs that it cannot load."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
