"""The configs of compressions. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ..tables import CompressionConfig, LossyCompression

if TYPE_CHECKING:
    from .codecs import Codec

Block = Annotated[int, Field(ge=2, le=2**20, multiple_of=2)]


class NoCompression(CompressionConfig):
    """Sends weights in fp32, both ways."""

    name: Literal["none"] = "none"


class BF16(LossyCompression):
    """Pseudo-gradients in bf16, both ways: 2 bytes a value."""

    name: Literal["bf16"] = "bf16"

    def build(self) -> Codec:
        """Return the codec."""
        from .codecs import BF16Codec

        return BF16Codec()


class Int8(LossyCompression):
    """Pseudo-gradients in integers of 8 bits with a scale a block; back in bf16."""

    name: Literal["int8"] = "int8"
    block: Block = 256
    """values that share a scale of fp32"""

    def build(self) -> Codec:
        """Return the codec."""
        from .codecs import IntegerCodec

        return IntegerCodec(8, self.block)


class Int4(LossyCompression):
    """Pseudo-gradients in integers of 4 bits with a scale a block; back in bf16."""

    name: Literal["int4"] = "int4"
    block: Block = 128
    """values that share a scale of fp32"""

    def build(self) -> Codec:
        """Return the codec."""
        from .codecs import IntegerCodec

        return IntegerCodec(4, self.block)


class TopK(LossyCompression):
    """The largest of each 4,096 values, 12 bits for the place and 2 for the value; back as the
    merged values that are not 0, in bf16 (SparseLoCo, arXiv:2508.15706).
    """

    name: Literal["topk"] = "topk"
    keep: Annotated[int, Field(ge=1, le=4096)] = 64
    """values of each 4,096 that a client sends"""

    def build(self) -> Codec:
        """Return the codec."""
        from .codecs import TopKCodec

        return TopKCodec(self.keep)
