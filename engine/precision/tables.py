"""The recipe's tables of formats narrower than 16 bits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..core.config import DEFAULTS, Table

Patterns = Annotated[list[str], Field(max_length=100)]


class LowPrecision(Table):
    """Which weights multiply in a format; weights, and what optimizers keep, stay as they are."""

    enabled: bool = False
    """multiply in this format"""
    targets: Annotated[Patterns, Field(min_length=1)] = ["*"]
    """which weights of blocks do: globs over parameter names, or "re:..." for a regular expression;
    norms, routers, embedding and head never do"""
    exclude: Patterns = []
    """which of these do not"""
    emulate: bool = False
    """round as the format does and multiply in the dtype of [precision] compute: for tests, on
    hardware that lacks the format; slower than without it"""


class Float8(LowPrecision):
    """Products in float8 (e4m3): of projections by torchao, of experts by our own kernels with a
    scale for each 128 values of a row and each 128 x 128 of a weight (arXiv:2412.19437).
    """

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "rowwise"
    """how projections are scaled: "tensorwise": a scale a tensor, gradients in e5m2; "rowwise": one
    a row, a power of two; "rowwise_with_gw_hp": that, but gradients of weights are not in float8"""
    gather_activations: bool = False
    """tensor parallel: gather rows in float8 where all projections that take them multiply in it;
    "rowwise" recipes alone"""


class MX(LowPrecision):
    """Products of projections in MXFP8: e4m3 with a power of two for each 32 values (OCP
    Microscaling Formats 1.0), by torchao.
    """

    recipe: Literal["mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp"] = "mxfp8_rceil"
    """scales are rounded up; "mxfp8_rceil_wgrad_with_hp": gradients of weights are not in MXFP8"""


class Precision(Table):
    """In which dtypes a step computes."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """"auto": bf16 where the device multiplies it in hardware, else fp32"""
    parameters: Literal["fp32", "bf16"] = "fp32"
    """dtype in which weights and their gradients are held; optimizers update in fp32, and what they
    keep is in fp32"""
    stochastic_rounding: bool = True
    """of parameters in bf16: round an update up or down at random, so that small ones are not lost;
    false: to the nearest"""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """dtype of gradient reduction between ranks"""
    float8: Float8 = DEFAULTS
    """products in float8"""
    mx: MX = DEFAULTS
    """products in MXFP8"""

    @property
    def low_precision(self) -> dict[str, LowPrecision]:
        """The tables of low-precision formats that are enabled, by their word."""
        tables: dict[str, LowPrecision] = {"float8": self.float8, "mx": self.mx}
        return {word: table for word, table in tables.items() if table.enabled}
